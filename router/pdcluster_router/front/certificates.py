"""The certificate of each port with TLS: tested before use, and read anew when its files change.

Files that cannot be used are logged once, and the old certificate stays; ``files/pem.py`` says which files these are.
If a port requires certificates of its clients, the file of trusted authorities is one of its files. On the picker's
port gRPC makes the handshakes, so it must be able to use the files too.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.files.pem import KeyPair, PairPem, day_of, modern, trust_those_in
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.settings.router_settings import Settings

if TYPE_CHECKING:
    from pdcluster_router.http.grpc_tls import GrpcFiles

logger = logging.getLogger(__name__)

CLIENT_PORT: Final = ("--tls-cert", "--tls-key")
INTERNAL_PORT: Final = ("--internal-tls-cert", "--internal-tls-key", "--internal-client-ca")
PICKER_PORT: Final = ("--picker-tls-cert", "--picker-tls-key", "--picker-client-ca")


@dataclass(frozen=True, slots=True)
class ProvenFiles:
    """The files of one port as they were read, and what a handshake in memory has shown of them."""

    context: ssl.SSLContext
    """A server's, with this certificate."""
    expires_at: float
    """The certificate's end in Unix seconds."""
    pair: PairPem
    ca: str | None
    """The authorities of the certificates that clients must show, in PEM; None: clients need no certificate."""


class Certificate:
    """The current certificate of one port. Event loop only."""

    _judges: ClassVar[str] = "clients"

    def __init__(
        self, cert: Path, key: Path, interval_s: float, flags: Sequence[str] = CLIENT_PORT, ca: Path | None = None
    ) -> None:
        """``ca``: the authorities of the certificates that clients must show; None: clients need no certificate.

        Raises:
            ConfigError: The files cannot be used.
        """
        self._pair = KeyPair(cert, key, flags[0], flags[1], self._judges)
        self._ca = None if ca is None else (ca, flags[2])
        self.context: ssl.SSLContext
        """The context for the next client, a new object after each change."""
        self.expires_at: float
        """The certificate's end in Unix seconds."""
        self.watch = FileWatch("tls certificate", [path for path in (cert, key, ca) if path], interval_s, self._read)
        self._load()

    def _read(self) -> None:
        """Reads the files anew. Raises: ConfigError: They cannot be used; the old certificate stays."""
        self._load()
        logger.info("tls certificate changed expires=%s", day_of(self.expires_at))

    def _load(self) -> None:
        """Raises: ConfigError: The files cannot be used; nothing has changed."""
        self._take(load_certificate(self._pair, self._ca))

    def _take(self, proven: ProvenFiles) -> None:
        """Shows these files from now on. Raises: ConfigError: They cannot be used; nothing has changed."""
        self.context, self.expires_at = proven.context, proven.expires_at


class PickerCertificate(Certificate):
    """The current certificate of the picker's port. Needs the packages of ``pdcluster[picker]``."""

    _judges = "gateways"
    grpc_files: GrpcFiles
    """The files for the next gateway, a new object after each change. gRPC's threads read this, too."""

    def _take(self, proven: ProvenFiles) -> None:
        from pdcluster_router.http.grpc_tls import GrpcFiles

        pair, ca = proven.pair, proven.ca
        files = GrpcFiles(pair.cert.encode(), pair.key, None if ca is None else ca.encode())
        if fault := files.fault():
            raise ConfigError(f"{self._pair}: {fault}")
        self.grpc_files = files
        super()._take(proven)


def certificate_of(settings: Settings) -> Certificate | None:
    """The client port's certificate; None: the port is plain. Raises: ConfigError: The files cannot be used."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificate(settings.tls_cert, settings.tls_key, settings.tls_interval_s)


def internal_certificate_of(settings: Settings) -> Certificate | None:
    """The internal port's certificate; None: the port is plain. Raises: ConfigError: The files cannot be used."""
    cert, key = settings.internal_tls_cert, settings.internal_tls_key
    if cert is None or key is None:
        return None
    return Certificate(cert, key, settings.tls_interval_s, INTERNAL_PORT, settings.internal_client_ca)


def picker_certificate_of(settings: Settings) -> PickerCertificate | None:
    """The picker's certificate; None: its port is plain. Raises: ConfigError: The files cannot be used."""
    cert, key = settings.picker_tls_cert, settings.picker_tls_key
    if cert is None or key is None:
        return None
    return PickerCertificate(cert, key, settings.tls_interval_s, PICKER_PORT, settings.picker_client_ca)


def load_certificate(pair: KeyPair, ca: tuple[Path, str] | None = None) -> ProvenFiles:
    """``pair``, read and proven. ``ca``: the file with the authorities of the certificates that clients must show, and
    the flag that gave it.

    Raises:
        ConfigError: A file cannot be read, key and certificate do not match, or no client would accept them now.
    """
    context = modern(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    pem = pair.load_into(context)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    expires_at = pair.prove(client, context, client, pem.cert)
    if ca is None:
        return ProvenFiles(context, expires_at, pem, None)
    authorities = trust_those_in(*ca, context)
    context.verify_mode = ssl.CERT_REQUIRED
    return ProvenFiles(context, expires_at, pem, authorities)
