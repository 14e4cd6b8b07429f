"""The trust in engines with TLS, and the certificate that they are shown. Both are read anew when their files change.

    --engine-ca       the authorities that it trusts; without: those of this system
    --engine-cert     the certificate for engines that ask, with --engine-key; without: none
    --engine-tls-name the one name that engines' certificates have; without: each the host of its URL

Files that cannot be used are refused at the start, and change nothing later: new connections are made with the last
good ones, and open ones go on. An engine whose URL begins with http:// is asked in the clear, and one with https://
never.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Final

from pdcluster_router.files.pem import KeyPair, day_of, modern, trust_those_in
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.http.engine_tls import EngineDoor
from pdcluster_router.http.handshakes import Handshakes
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.telemetry.failures import Failure, FailureKind, Failures

logger = logging.getLogger(__name__)

_CA: Final = "--engine-ca"


class EngineTrust:
    """One per router. Event loop only."""

    def __init__(self, settings: Settings, handshakes: Handshakes, failures: Failures) -> None:
        """``handshakes``: those of all ports, so that one turn of the loop has no more than its share.

        Raises:
            ConfigError: The files cannot be used.
        """
        self._ca, self._pair, self._name = settings.engine_ca, key_pair_in(settings), settings.engine_tls_name
        self._handshakes = handshakes.row()
        self._failures = failures
        paths = [self._ca] if self._ca else []
        if self._pair is not None:
            paths += [self._pair.cert, self._pair.key]
        self.watch = FileWatch("engines' tls", paths, settings.tls_interval_s, self._read) if paths else None
        """None: there are no files."""
        self._context: ssl.SSLContext | None = None
        """None: there are no files, and no engine with TLS was asked yet."""
        self.expires_at: float | None = None
        """Unix seconds until which our certificate is valid; None: there is none."""
        if paths:
            self._context, self.expires_at = engine_context(self._ca, self._pair)

    def door(self, name: str, host: str) -> EngineDoor:
        """The door for connections to the engine ``name`` (as logs have it) at ``host``."""
        told = _LastReason(name, self._failures)
        return EngineDoor(
            context=self._current,
            name=self._name or host,
            authorities=f"those of {_CA}" if self._ca else "this system's authorities",
            handshakes=self._handshakes,
            on_agreed=told.agreed,
            on_refused=told.refused,
        )

    def _current(self) -> ssl.SSLContext:
        if self._context is None:
            self._context, _ = engine_context(None, None)
        return self._context

    def _read(self) -> None:
        """Takes the files as they are now. Raises: ConfigError: All stays as it is."""
        self._context, self.expires_at = engine_context(self._ca, self._pair)
        logger.info("engines' tls changed expires=%s", day_of(self.expires_at) if self.expires_at else "-")


class _LastReason:
    """The last reason why one engine and the router came to no TLS agreement. The reason is logged once until there is
    an agreement or another reason, and counted each time."""

    def __init__(self, name: str, failures: Failures) -> None:
        self._name = name
        self._failures = failures
        self._reason = ""

    def agreed(self) -> None:
        self._reason = ""

    def refused(self, reason: str) -> None:
        failure = Failure(FailureKind.ENGINE_TLS_REFUSED, engine=self._name, reason=reason)
        if reason == self._reason:
            self._failures.count(failure.kind)
        else:
            self._reason = reason
            self._failures.tell(failure)


def key_pair_in(settings: Settings) -> KeyPair | None:
    """The certificate that engines are shown; None: they are shown none."""
    if settings.engine_cert is None or settings.engine_key is None:
        return None
    return KeyPair(settings.engine_cert, settings.engine_key, "--engine-cert", "--engine-key", "engines")


def check_engine_files(settings: Settings) -> None:
    """Raises: ConfigError: The files of trust in engines cannot be used."""
    pair = key_pair_in(settings)
    if settings.engine_ca or pair:
        engine_context(settings.engine_ca, pair)


def engine_context(ca: Path | None, pair: KeyPair | None) -> tuple[ssl.SSLContext, float | None]:
    """A client's context that trusts ``ca`` (None: this system's authorities) and shows ``pair``; and the end of that
    certificate in Unix seconds.

    Raises:
        ConfigError: A file cannot be read, two files do not belong together, or no engine would take the certificate
            now.
    """
    context = modern(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    if ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        trust_those_in(ca, _CA, context)
    return context, _show(pair, context) if pair is not None else None


def _show(pair: KeyPair, context: ssl.SSLContext) -> float:
    pem = pair.load_into(context)
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for end in (client, server):
        pair.load_into(end)
    server.verify_mode = ssl.CERT_REQUIRED
    return pair.prove(client, server, server, pem.cert)
