"""The certificate of each port with TLS: tested before use, and read anew when its files change.

Files that cannot be used are logged once, and the old certificate stays; ``files/pem.py`` says which files these are.
If a port requires certificates of its clients, the file of trusted authorities is one of its files.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pdcluster_router.files.pem import KeyPair, day_of, modern, trust_those_in
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.settings import Settings

logger = logging.getLogger(__name__)

CLIENT_PORT: Final = ("--tls-cert", "--tls-key")
INTERNAL_PORT: Final = ("--internal-tls-cert", "--internal-tls-key")
CLIENT_CA: Final = "--internal-client-ca"


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
        self._ca = ca
        self.watch = FileWatch("tls certificate", [path for path in (cert, key, ca) if path], interval_s, self._read)
        self.context, self.expires_at = load_certificate(self._pair, ca)
        """The context for the next client, a new object after each change; the certificate's end in Unix seconds."""

    def _read(self) -> None:
        """Reads the files anew. Raises: ConfigError: They cannot be used; the old certificate stays."""
        self.context, self.expires_at = load_certificate(self._pair, self._ca)
        logger.info("tls certificate changed expires=%s", day_of(self.expires_at))


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


def load_certificate(pair: KeyPair, ca: Path | None = None) -> tuple[ssl.SSLContext, float]:
    """A server's context with this certificate, and the Unix seconds until which it is valid.

    Raises:
        ConfigError: A file cannot be read, key and certificate do not match, or no client would accept them now.
    """
    context = modern(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    pem = pair.load_into(context)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    expires_at = pair.prove(client, context, client, pem)
    if ca is not None:
        trust_those_in(ca, CLIENT_CA, context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context, expires_at
