"""The certificate that clients of the client port are shown: read, proven, and read anew when its files change.

    new files --> PEM, and no password?  --> a key of that certificate?
      --> a handshake in memory: valid now, and for a server?  --> new connections are shown it; open ones go on

The files are looked at every few seconds, as that of the API keys, and on SIGHUP. Files that cannot be used are told
once and change nothing.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.front.files import FileState, read_file, state_of
from pdcluster_router.settings import Settings

logger = logging.getLogger(__name__)

_CERT, _KEY = "--tls-cert", "--tls-key"
_ALPN: Final = ["http/1.1"]
_STEPS: Final = 10
"""Of a handshake in memory; it takes four."""


class Certificate:
    """The certificate of now. One per router with TLS. Event loop only."""

    def __init__(self, cert: Path, key: Path, interval_s: float) -> None:
        """Raises: ConfigError: The files cannot be used."""
        self._cert, self._key, self._interval_s = cert, key, interval_s
        self._looked_at = self._look()
        self.context, self.expires_at = load_certificate(cert, key)
        """For the next client, another object when the files have changed; Unix seconds until which it is valid."""

    def reload(self) -> None:
        """The certificate is that of the files as they are now, or stays as it is."""
        self._looked_at = self._look()
        try:
            self.context, self.expires_at = load_certificate(self._cert, self._key)
        except ConfigError as error:
            logger.warning("tls certificate not changed reason=%s", error)
        else:
            logger.info("tls certificate changed expires=%s", _day_of(self.expires_at))

    async def watch(self) -> None:
        """For ever: the certificate follows its files. One task owns this."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._look() != self._looked_at:
                self.reload()

    def _look(self) -> tuple[FileState, FileState]:
        """Before they are read: what changes meanwhile is seen at the next look."""
        return state_of(self._cert), state_of(self._key)


def certificate_of(settings: Settings) -> Certificate | None:
    """None: the client port is plain. Raises: ConfigError: The files cannot be used."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificate(settings.tls_cert, settings.tls_key, settings.tls_interval_s)


def load_certificate(cert: Path, key: Path) -> tuple[ssl.SSLContext, float]:
    """A server's context with this certificate, and the Unix seconds until which it is valid.

    Raises:
        ConfigError: A file cannot be read, they do not belong together, or no client would take the certificate now.
    """
    pem = _certificates_in(cert)
    _check_key(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(_ALPN)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(f"{_CERT} {cert} and {_KEY} {key}: {_problem_of(error)}") from error
    except OSError as error:  # One of them is gone since.
        raise ConfigError(f"{_CERT} {cert} and {_KEY} {key}: {error.strerror}: name files that stay") from error
    return context, _proven_until(context, pem, cert)


def _certificates_in(path: Path) -> str:
    pem = read_file(path, _CERT)
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise ConfigError(
            f"{_CERT} {path}: it has no certificate in PEM: name the server's, and those between behind it"
        )
    return pem.decode("ascii", "ignore")


def _check_key(path: Path) -> None:
    pem = read_file(path, _KEY)
    if b"PRIVATE KEY-----" not in pem:
        raise ConfigError(f"{_KEY} {path}: it has no private key in PEM: name the one of {_CERT}")
    if b"ENCRYPTED" in pem:
        raise ConfigError(f"{_KEY} {path}: the key has a password: give one without, readable by this process only")


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    return ""


def _problem_of(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate: give two that belong together"
    return f"{_words_of(error)}: give a whole certificate and its key in PEM, the server's first"


def _proven_until(context: ssl.SSLContext, pem: str, path: Path) -> float:
    """A client that trusts this very certificate agrees with ``context``; until when it will, in Unix seconds.

    Raises:
        ConfigError: It does not, for one is not valid now, or for another use.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(cadata=pem)
        shown = _agree(client, context)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{_CERT} {path}: {error.verify_message}: give one that clients take today") from error
    except ssl.SSLError as error:
        raise ConfigError(f"{_CERT} {path}: {_words_of(error)}: give whole ones in PEM, the server's first") from error
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _agree(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, object]:
    """A whole handshake in memory; the certificate that was shown. Raises: ssl.SSLError: There is no agreement."""
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
    return dict(ends[0].getpeercert() or {})


def _words_of(error: ssl.SSLError) -> str:
    return error.reason.lower().replace("_", " ") if error.reason else "OpenSSL cannot read it"


def _day_of(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()
