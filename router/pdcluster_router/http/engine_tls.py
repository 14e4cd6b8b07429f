"""The TLS handshake with an engine, and why it fails. A whole handshake is an agreement. ``records.py`` does the rest.

    made --hello, its certificate, ours--> agreed: the connection of the pool has it
       +--another protocol, a certificate that is refused, a refusal, hung up, too slow: no byte of a request is sent

Only an engine's refusal of our certificate may come later: in TLS 1.3 the engine checks it after the agreement. vLLM's
server then hangs up without a byte. A server that accepts it first sends session tickets (RFC 8446, 4.6.1).

Other files decide which authorities are trusted, and which certificate is shown.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pdcluster_protocol.pem_files import words_of
from pdcluster_router.files.pem import day_of
from pdcluster_router.http.connection import Cut, ResponseLost
from pdcluster_router.http.handshakes import HandshakeRow
from pdcluster_router.http.records import TlsTransport

_ALERT, _HANDSHAKE = 0x15, 0x16
"""A server with TLS begins with one of these bytes."""
_WRONG_NAME: Final = frozenset((62, 64))
_WRONG_TIME: Final = frozenset((9, 10))
_UNKNOWN_ISSUER: Final = frozenset((2, 7, 18, 19, 20, 21, 24, 30))
"""OpenSSL's ``X509_V_ERR_...``."""
_MAX_NAMES: Final = 5


class NoAgreementError(Exception):
    """Why there is no agreement with an engine, and the cure. ``is_silent``: the engine may be stopped, or far away."""

    def __init__(self, reason: str, *, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_silent = is_silent


@dataclass(frozen=True, slots=True)
class TlsCures:
    """The cures where there is no agreement, in words for people."""

    no_tls: str = "start it with --ssl-certfile and --ssl-keyfile, or name it by plain http, for requests in the clear"
    wrong_name: str = "give it one for that name, or name one that it has with --engine-tls-name"
    unknown_issuer: str = "name the file of its authority with --engine-ca"


OF_ENGINES: Final = TlsCures()


@dataclass(frozen=True, slots=True)
class EngineDoor:
    """The common part of all connections to one engine, or another server, with TLS."""

    context: Callable[[], ssl.SSLContext]
    """Returns the current context."""
    name: str
    """DNS name or IP address that the engine's certificate must have."""
    authorities: str
    """The authorities that are trusted, in words for people."""
    handshakes: HandshakeRow
    on_agreed: Callable[[], None]
    """Called when the engine has sent bytes after an agreement: it has accepted our certificate."""
    on_refused: Callable[[str], None]
    """Called with the reason for each connection on which TLS fails."""
    cures: TlsCures = OF_ENGINES


class EngineTls(TlsTransport):
    """One connection to an engine. Event loop only."""

    def __init__(self, door: EngineDoor, above: asyncio.Protocol, loop: asyncio.AbstractEventLoop) -> None:
        """``above``: gets the connection once there is an agreement."""
        super().__init__()
        self._door = door
        self._waiting: asyncio.Protocol | None = above
        self._agreement: asyncio.Future[NoAgreementError | None] = loop.create_future()
        self._has_spoken = self._has_begun = False
        """Whether the engine has sent bytes, after the agreement if there is one; whether it speaks TLS."""
        self._is_left = False
        """Whether this side has closed the connection."""
        self._refusal: ResponseLost | None = None
        """The engine's refusal behind the agreement."""

    async def agree(self, timeout_s: float, deadline: float) -> None:
        """Waits until there is an agreement.

        Raises:
            NoAgreementError: None is reached by ``deadline`` (the loop's seconds). The message names ``timeout_s``.
        """
        try:
            async with asyncio.timeout_at(deadline):
                problem = await self._agreement
        except TimeoutError:
            problem = NoAgreementError(
                f"no TLS agreement within {timeout_s:g} s: see that the engine is well, and that TLS is what it speaks",
                is_silent=True,
            )
        if problem is not None:
            self._door.on_refused(problem.reason)
            raise problem

    def abort(self) -> None:
        """Closes the connection at once. May be called before it is made."""
        self._has_ended = self._is_left = True
        if hasattr(self, "_plain"):
            self._plain.abort()

    # What the event loop says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._plain = transport
        if self._has_ended:
            transport.abort()
        else:
            self._wants_turn()

    def data_received(self, data: bytes) -> None:
        if self._has_spoken:
            super().data_received(data)
            return
        self._has_spoken = True
        is_behind_agreement = self._above is not None
        super().data_received(data)
        if is_behind_agreement and self._refusal is None:
            self._door.on_agreed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest = None
        above, self._above = self._above, None
        if above is not None:
            above.connection_lost(self._cut() or exc)
        else:
            self._end(
                NoAgreementError(f"it hung up during the TLS handshake{_because(exc)}: {_SEE_LOG_TOO}", is_silent=True)
            )
        self._waiting = None

    # The handshake.

    def shake(self) -> None:
        """Takes one step of the handshake; the first step sends the hello. ``Handshakes`` calls it."""
        if self._has_ended or self._plain.is_closing():
            return
        if self._tls is None:
            name = self._door.name
            self._tls = self._door.context().wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        elif self._rest is None:
            return
        if self._rest is not None and not self._has_begun and self._rest[0] not in (_ALERT, _HANDSHAKE):
            self._refuse(f"it speaks no TLS, and it is to be asked by https: {self._door.cures.no_tls}")
            return
        self._has_begun = self._rest is not None
        try:
            is_agreed = self._step()
        except ssl.SSLError as error:
            self._refuse(_problem_of(error, self._tls, self._door))
        else:
            if is_agreed:
                self._agreed()

    def _wants_turn(self) -> None:
        self._door.handshakes.enter(self)

    def _agreed(self) -> None:
        assert self._waiting is not None
        self._has_spoken = False  # From now on: whether the engine has accepted our certificate.
        self._end(None)
        self._open_to(self._waiting)

    def _refuse(self, reason: str) -> None:
        """Ends the handshake, and tells the engine."""
        self._flush()
        self._has_ended = True
        self._end(NoAgreementError(reason))
        self._plain.close()

    def _end(self, problem: NoAgreementError | None) -> None:
        if not self._agreement.done():
            self._agreement.set_result(problem)

    # Behind the agreement.

    def _give_up(self, error: ssl.SSLError) -> None:
        assert self._tls is not None
        reason = _problem_of(error, self._tls, self._door)
        self._door.on_refused(reason)
        self._refusal = ResponseLost(reason, is_untrusted=True)
        self.abort()

    def _peer_ended(self) -> None:
        """The engine has ended in order, so it will answer no more."""
        self.abort()

    def _cut(self) -> Cut | None:
        """The reason of the end for the pool's connection; None: TLS does not explain the end."""
        if self._refusal is None and self._is_unheard():
            self._door.on_refused(_UNHEARD)
            self._refusal = ResponseLost(_UNHEARD, is_untrusted=True)
        return None if self._refusal is None else Cut(self._refusal)

    def _is_unheard(self) -> bool:
        """Whether the engine hung up after an agreement by TLS 1.3, without a byte in between."""
        return not (self._is_left or self._has_spoken) and self._tls is not None and self._tls.version() == "TLSv1.3"


_SEE_LOG: Final = "see its log"
_OUR_CERTIFICATE: Final = "give the router one that the engine trusts: --engine-cert and --engine-key"
_SEE_LOG_TOO: Final = f"{_SEE_LOG}; if it asks for certificates, {_OUR_CERTIFICATE}"
_UNHEARD: Final = (
    "it hung up right behind the TLS handshake: it may ask for a client certificate (--ssl-cert-reqs 2), "
    f"and have got none or refused the router's: {_OUR_CERTIFICATE}"
)


def _problem_of(error: ssl.SSLError, tls: ssl.SSLObject, door: EngineDoor) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_problem(error, _shown(tls), door)
    words = words_of(error, "nonsense")
    if "alert" not in words:
        return f"its TLS makes no sense ({words}): see that {door.name} is the engine, and its log"
    cure = _OUR_CERTIFICATE if "certificate" in words or "unknown ca" in words else _SEE_LOG
    return f"it refuses TLS with this router ({words}): {cure}"


def _certificate_problem(error: ssl.SSLCertVerificationError, shown: dict[str, Any], door: EngineDoor) -> str:
    code, said = error.verify_code, error.verify_message.rstrip(".")
    names = _names_in(shown)
    if code in _WRONG_NAME:
        return f"its certificate is for {names}, and {door.name} was expected: {door.cures.wrong_name}"
    if code in _WRONG_TIME and (valid := _days_in(shown)):
        return f"its certificate for {names} is valid from {valid}, and not now ({said}): renew it, or set the clock"
    if code in _UNKNOWN_ISSUER:
        return (
            f"its certificate for {names} is signed by {_common_name(shown)!r}, and {door.authorities} do not know "
            f"that one ({said}): {door.cures.unknown_issuer}"
        )
    return f"its certificate for {names} is refused ({said}): give it one that is for servers"


def _shown(tls: ssl.SSLObject) -> dict[str, Any]:
    """The engine's certificate in the form of ``getpeercert``, which returns only trusted certificates. Python 3.13 has
    a public function for it."""
    try:
        chain = tls._sslobj.get_unverified_chain()  # type: ignore[attr-defined]  # typeshed leaves it out
        return dict(chain[0].get_info()) if chain else {}
    except (AttributeError, ValueError, ssl.SSLError):  # ValueError: its names may be any bytes.
        return {}


def _names_in(shown: dict[str, Any]) -> str:
    names = [str(name) for kind, name in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more or "no name"


def _days_in(shown: dict[str, Any]) -> str:
    """The first and the last day of the certificate; empty: they cannot be read."""
    try:
        return " to ".join(day_of(ssl.cert_time_to_seconds(shown[end])) for end in ("notBefore", "notAfter"))
    except (KeyError, ValueError, OverflowError):
        return ""


def _common_name(shown: dict[str, Any]) -> str:
    parts = dict(pair for part in shown.get("issuer", ()) for pair in part)
    return str(parts.get("commonName") or parts.get("organizationName") or "an authority without a name")


def _because(exc: Exception | None) -> str:
    return f" ({exc})" if exc else ""
