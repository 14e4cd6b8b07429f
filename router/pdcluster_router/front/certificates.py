"""The certificate of each port with TLS: tested before use, and read anew when its files change.

Files that cannot be used are logged once, and the old certificate stays; ``files/pem.py`` says which files these are.
If a port requires certificates of its clients, the file of trusted authorities is one of its files. On the picker's
port gRPC makes the handshakes, so it must be able to use the files too.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.files.pem import KeyPair, day_of, modern, trust_those_in
from pdcluster_router.files.reading import read_file
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.settings.router_settings import Settings

if TYPE_CHECKING:
    from pdcluster_router.http.grpc_tls import GrpcFiles

logger = logging.getLogger(__name__)

CLIENT_PORT: Final = ("--tls-cert", "--tls-key")
INTERNAL_PORT: Final = ("--internal-tls-cert", "--internal-tls-key", "--internal-client-ca")
PICKER_PORT: Final = ("--picker-tls-cert", "--picker-tls-key", "--picker-client-ca")


class Certificate:
    """The current certificate of one port. Event loop only."""

    def __init__(
        self, cert: Path, key: Path, interval_s: float, flags: Sequence[str] = CLIENT_PORT, ca: Path | None = None
    ) -> None:
        """``ca``: the authorities of the certificates that clients must show; None: clients need no certificate.

        Raises:
            ConfigError: The files cannot be used.
        """
        self._pair = KeyPair(cert, key, flags[0], flags[1], "clients")
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
        self.context, self.expires_at = load_certificate(self._pair, self._ca)


class PickerCertificate(Certificate):
    """The current certificate of the picker's port. Needs the packages of ``pdcluster[picker]``."""

    grpc_files: GrpcFiles
    """The files for the next gateway, a new object after each change. gRPC's threads read this, too."""

    def _load(self) -> None:
        """As ``Certificate``. A renewal between two reads mixes old with new: then all files are read once more."""
        with suppress(ConfigError):
            self._load_once()
            return
        self._load_once()

    def _load_once(self) -> None:
        loaded = load_certificate(self._pair, self._ca)
        files = self._read_for_grpc()
        if not files.are_usable():
            raise ConfigError(
                f"{self._pair.cert_flag} {self._pair.cert} and {self._pair.key_flag} {self._pair.key}: gRPC cannot use "
                "them: give a key of another kind, as RSA, or ECDSA with P-256"
            )
        self.grpc_files = files
        self.context, self.expires_at = loaded

    def _read_for_grpc(self) -> GrpcFiles:
        from pdcluster_router.http.grpc_tls import GrpcFiles

        cert, key = (read_file(self._pair.cert, self._pair.cert_flag), read_file(self._pair.key, self._pair.key_flag))
        return GrpcFiles(cert, key, read_file(*self._ca) if self._ca else None)


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


def load_certificate(pair: KeyPair, ca: tuple[Path, str] | None = None) -> tuple[ssl.SSLContext, float]:
    """A server's context with this certificate, and the Unix seconds until which it is valid. ``ca``: the file with the
    authorities of the certificates that clients must show, and the flag that gave it.

    Raises:
        ConfigError: A file cannot be read, key and certificate do not match, or no client would accept them now.
    """
    context = modern(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    pem = pair.load_into(context)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    expires_at = pair.prove(client, context, client, pem)
    if ca is not None:
        trust_those_in(*ca, context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context, expires_at
