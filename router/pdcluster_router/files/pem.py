"""Certificates, keys and authorities in PEM files: read, and proven by a handshake in memory before they are used.

    new files --> PEM, and no password?  --> a key of that certificate?
      --> a handshake in memory: valid now, and for this use?  --> new connections are made with it

OpenSSL judges: no certificate is parsed here. Errors name the flag that gave the file.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.pem_files import no_password, words_of
from pdcluster_router.files.reading import read_file

ALPN: Final = ["http/1.1"]
LONG_KEYS: Final = "give one of RSA with 2048 bits or more, or of ECDSA with P-256 or P-384"
"""The cure for a key that is too short. All our peers make handshakes with these."""
_STEPS: Final = 10
"""The most steps of a handshake in memory; it takes four."""


@dataclass(frozen=True, slots=True)
class PairPem:
    """A certificate, with those between it and its authority, and its key, as they were in their files."""

    cert: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The files of a certificate and its key, the flags that gave them, and a word for the certificate's judges."""

    cert: Path
    key: Path
    cert_flag: str
    key_flag: str
    judges: str
    """The peers that are shown the certificate: ``clients``, ``engines`` or ``gateways``."""

    def load_into(self, context: ssl.SSLContext) -> PairPem:
        """``context`` shows the certificate from now on. Returns the very pair that it shows.

        A renewal between two reads mixes old with new: then both files are read once more.

        Raises:
            ConfigError: A file cannot be read, the two files do not belong together, or they do not stay the same.
        """
        with suppress(ConfigError):
            return self._load_into(context)
        return self._load_into(context)

    def _load_into(self, context: ssl.SSLContext) -> PairPem:
        pem = self._read()
        self._give_to(context)
        if self._read() != pem:  # OpenSSL reads the files by itself, and may have read either.
            raise ConfigError(f"{self}: they change while they are read: replace both at once")
        return pem

    def _give_to(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.cert, self.key, password=no_password)
        except ssl.SSLError as error:
            raise ConfigError(f"{self}: {_problem_of(error)}") from error
        except OSError as error:  # One of the files is gone since.
            raise ConfigError(f"{self}: {error.strerror}: name files that stay") from error

    def __str__(self) -> str:
        """Both files, as errors name them."""
        return f"{self.cert_flag} {self.cert} and {self.key_flag} {self.key}"

    def prove(self, client: ssl.SSLContext, server: ssl.SSLContext, judge: ssl.SSLContext, pem: str) -> float:
        """``judge``, which is ``client`` or ``server``, trusts this very certificate and comes to an agreement with the
        other.

        Returns:
            The end of the certificate, in Unix seconds.

        Raises:
            ConfigError: There is no agreement: a certificate of ``pem`` is not valid now, or is for another use.
        """
        judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        who = f"{self.cert_flag} {self.cert}"
        try:
            judge.load_verify_locations(cadata=pem)
            shown = _agree(client, server, judge)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(f"{who}: {error.verify_message}: give one that {self.judges} take today") from error
        except ssl.SSLError as error:
            raise ConfigError(f"{who}: {words_of(error)}: give whole ones in PEM, the one to show first") from error
        return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))

    def _read(self) -> PairPem:
        between = "name the one to show, and those between behind it"
        return PairPem(certificates_in(self.cert, self.cert_flag, between), self._read_key())

    def _read_key(self) -> bytes:
        pem = read_file(self.key, self.key_flag)
        who = f"{self.key_flag} {self.key}"
        if b"PRIVATE KEY-----" not in pem:
            raise ConfigError(f"{who}: it has no private key in PEM: name the one of {self.cert_flag}")
        if b"ENCRYPTED" in pem:
            raise ConfigError(f"{who}: the key has a password: give one without, readable by this process only")
        return pem


def certificates_in(path: Path, flag: str, cure: str) -> str:
    """The text of a file with certificates in PEM.

    Raises:
        ConfigError: It cannot be read, or has none.
    """
    pem = read_file(path, flag)
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise ConfigError(f"{flag} {path}: it has no certificate in PEM: {cure}")
    return pem.decode("ascii", "ignore")


def trust_those_in(path: Path, flag: str, context: ssl.SSLContext) -> str:
    """``context`` trusts each certificate in this file: an authority's, or one that a peer itself shows. Returns them.

    Raises:
        ConfigError: It cannot be read, or has none.
    """
    pem = certificates_in(path, flag, "name the file with the certificates to trust")
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=pem)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag} {path}: {words_of(error)}: give whole certificates in PEM") from error
    return pem


def modern(context: ssl.SSLContext) -> ssl.SSLContext:
    """The same context, now with TLS 1.2 and 1.3 only, HTTP/1.1 in ALPN, and no renegotiation."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(ALPN)
    return context


def day_of(unix_s: float) -> str:
    """The date of a time, UTC."""
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def _problem_of(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate: give two that belong together"
    if error.reason == "EE_KEY_TOO_SMALL":
        return f"the key is too short: {LONG_KEYS}"
    return f"{words_of(error)}: give a whole certificate and its key in PEM, the one to show first"


def _agree(client: ssl.SSLContext, server: ssl.SSLContext, judge: ssl.SSLContext) -> dict[str, object]:
    """Makes a whole handshake in memory. Returns the certificate that the judge was shown, as ``getpeercert`` does.

    Raises:
        ssl.SSLError: There is no agreement.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    left = list(ends)
    for end in ends * _STEPS:
        if end in left:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            left.remove(end)
    return dict(ends[0 if judge is client else 1].getpeercert() or {})
