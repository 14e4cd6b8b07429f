"""The TLS handshake of a client's connection. A whole handshake is an agreement. ``records.py`` does the rest.

The connection counts as a client's from its beginning. If there is no agreement, the reason is reported once.
``front/certificates.py`` decides which certificate is shown.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from uvicorn.protocols.utils import get_remote_addr

from pdcluster_protocol.pem_files import words_of
from pdcluster_router.core.clients.client_hello import BadHello, HelloWatch, asks_again
from pdcluster_router.core.clients.room import Unread, without_used
from pdcluster_router.http.handshakes import TlsPort
from pdcluster_router.http.records import PIECE_BYTES, TlsTransport

_A, _Z = b"AZ"
"""TLS begins with no letter, and every method of HTTP with one."""
_BAD_HELLO_ALERT: Final = b"\x15\x03\x03\x00\x02\x02\x2f"
"""A record with a fatal ``illegal_parameter``, as OpenSSL answers a ClientHello that is too large for itself."""
_NO_CERTIFICATE: Final = "PEER_DID_NOT_RETURN_A_CERTIFICATE"


class TlsConnection(TlsTransport):
    """One connection of a client. Event loop only."""

    is_in_use = False
    """False before the agreement. After it, the protocol above has its own ``is_in_use``."""

    def __init__(self, port: TlsPort) -> None:
        super().__init__()
        self._port = port
        self._hello: HelloWatch | None = HelloWatch()
        """Follows the ClientHello that comes; None: the ClientHello is whole."""
        self._timer: asyncio.TimerHandle | None = None
        self._unread: Unread
        """The room for ``_rest``."""

    # What the event loop says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._plain = transport
        self._timer = asyncio.get_running_loop().call_later(self._port.handshake_timeout_s, self._shakes_too_long)
        self._port.shaking.add(self)
        peer = get_remote_addr(transport)
        self._port.clients.opened(self, peer[0] if peer else "")
        self._unread = self._port.new_unread(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._rest = None
        self._unread.release()
        above, self._above = self._above, None
        if above is not None:
            above.connection_lost(exc)
        elif self in self._port.shaking:
            if self._tls is not None and not self._has_ended:
                self._port.on_refused("the client left")
            self._port.shaking.discard(self)
            self._port.clients.closed(self)

    # The handshake.

    def shake(self) -> None:
        """Takes one step with the bytes that have come. ``Handshakes`` calls it."""
        if self._rest is None or self._has_ended or self._plain.is_closing():
            return
        if self._tls is None:
            if _A <= self._rest[0] <= _Z:
                self._refuse("plain HTTP: use https://", self._port.http_answer)
                return
            self._tls = self._port.context().wrap_bio(self._incoming, self._outgoing, server_side=True)
        try:
            is_agreed = self._step(self._num_bytes_to_read(self._rest))
        except BadHello as bad:
            self._refuse(str(bad), _BAD_HELLO_ALERT)
        except ssl.SSLError as error:
            self._refuse(_reason_of(error))
        else:
            if is_agreed:
                self._agreed()

    def _num_bytes_to_read(self, rest: memoryview) -> int:
        """The number of bytes for OpenSSL: up to the end of a ClientHello, so that a second one is checked first.

        Raises:
            BadHello: OpenSSL must not get this ClientHello.
        """
        hello = self._hello
        if hello is None:
            return PIECE_BYTES
        num_bytes = hello.feed(rest[:PIECE_BYTES])
        if hello.is_over:
            self._hello = None
        return num_bytes

    def _has_said(self, records: bytes) -> None:
        if asks_again(records):
            self._hello = HelloWatch()

    def _next_piece(self, num_bytes: int) -> memoryview:
        piece = super()._next_piece(num_bytes)
        self._unread.looked_at(len(piece))
        return piece

    def _hold_rest(self) -> None:
        """A client that finds no room is cut off: without these bytes nothing that follows can be decrypted."""
        if self._rest is None:
            self._unread.release()
        elif self._unread.hold(len(self._rest)):
            self._rest = without_used(self._rest)
        else:
            self._port.on_no_room()
            self._rest = None
            self.abort()

    def _wants_turn(self) -> None:
        self._port.handshakes.enter(self)

    def _agreed(self) -> None:
        self._stop_timer()
        self._port.shaking.discard(self)
        self._port.clients.closed(self)
        self._open_to(self._port.new_protocol())

    def _has_opened_to(self, above: asyncio.Protocol) -> None:
        """From now on the bytes that wait count for ``above``."""
        self._unread.release()
        self._unread = self._port.new_unread(above)

    def _refuse(self, reason: str, answer: bytes = b"") -> None:
        """Tells the client why, and gives it a moment to read the answer."""
        self._port.on_refused(reason)
        self._flush()
        if answer:
            self._plain.write(answer)
        self._has_ended = True
        self._rest = None
        self._stop_timer()
        self._linger()
        self._plain.write_eof()
        self._plain.resume_reading()  # To notice the client's end.

    def _shakes_too_long(self) -> None:
        if self._tls is not None and not self._has_ended:
            self._port.on_refused(f"no agreement within {self._port.handshake_timeout_s:g} s")
        self._has_ended = True
        self._plain.abort()

    def shutdown(self) -> None:
        """Closes a connection without a protocol. uvicorn calls it when the router ends."""
        self._has_ended = True
        self._plain.abort()

    def _give_up(self, error: ssl.SSLError) -> None:  # noqa: ARG002  # the client has been told
        self._has_ended = True
        self._plain.close()
        self._linger()

    def _linger(self) -> None:
        """Cuts the connection off after ``linger_s``, unless it has ended by then."""
        self._timer = asyncio.get_running_loop().call_later(self._port.linger_s, self._plain.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _reason_of(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate: {error.verify_message}"
    if error.reason == _NO_CERTIFICATE:
        return "the client has shown no certificate"
    return words_of(error, "nonsense")
