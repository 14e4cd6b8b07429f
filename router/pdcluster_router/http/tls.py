"""TLS of one client connection: bytes that come are decrypted for the protocol above, and its answers are encrypted.

    SHAKING --agreed--> OPEN --close(), write_eof(), the client's end, nonsense--> ENDED
       +--no TLS, no agreement, too slow, left--> told once, closed

Records are made and read in memory (``ssl.SSLObject``) on top of the loop's plain connection, not by the loop's own
TLS. So the promises of a plain connection hold: between the socket and the protocol lie one read of the loop (256 KiB)
and half a record at most, so reading and writing pause as if there were no TLS; a connection counts before there is an
agreement; an end is written at once, while the loop's own TLS waits for the client's and knows no half end.

Which certificate is shown is not decided here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from contextlib import suppress
from enum import Enum
from typing import Any, Final

from pdcluster_router.http.handshakes import SLICE_S, TlsPort

RECORD_BYTES: Final = 16 << 10
"""A record holds no more."""
PIECE_BYTES: Final = 16 << 10
"""Decrypted at a time: it cannot be stopped within."""
COSTLY_PIECE_BYTES: Final = 1 << 10
"""Of a connection that has once taken longer than ``SLICE_S`` for a piece: 16 KiB of KeyUpdates take up to 30 ms, those
of a body 20 us."""
MAX_REPLY_BYTES: Final = 4 << 10
"""TLS itself answers some of a client's messages. So many bytes of it to a client that takes nothing."""
_A, _Z = b"AZ"
"""TLS begins with no letter, and every method of HTTP with one."""
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER of a connection that ends with a reset."""


class _End(Enum):
    """How a client's bytes end."""

    NONE = 0
    """They go on."""
    ORDERLY = 1
    BROKEN = 2


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """One connection: the loop's protocol, and the transport of the protocol above. Event loop only."""

    def __init__(self, port: TlsPort) -> None:
        super().__init__()
        self._port = port
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        """None: the client has said nothing yet."""
        self._above: asyncio.Protocol | None = None
        """None: there is no agreement yet, or the connection is lost."""
        self._plain: asyncio.Transport
        self._rest: memoryview | None = None
        """Bytes that have come and are not decrypted."""
        self._is_paused = False
        """By the protocol above."""
        self._is_full = False
        """The client takes less than is written."""
        self._is_due = False
        """More is decrypted in the loop's next turn."""
        self._has_ended = False
        """Our end is written: what comes is dropped."""
        self._num_reply_bytes = 0
        self._piece_bytes = PIECE_BYTES
        self._timer: asyncio.TimerHandle | None = None

    # What the event loop says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._plain = transport
        self._timer = asyncio.get_running_loop().call_later(self._port.handshake_timeout_s, self._shakes_too_long)
        self._port.shaking.add(self)
        self._port.clients.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        if self._rest is not None:  # It was on its way when reading was paused.
            self._rest = memoryview(bytes(self._rest) + data)
        elif self._above is not None and len(data) <= self._piece_bytes:
            self._read(data)
        else:
            self._rest = memoryview(data)
            if self._above is not None:
                self._read_slice()
            else:
                self._plain.pause_reading()
                self._port.handshakes.enter(self)

    def eof_received(self) -> bool:
        if self._above is not None:
            self._above.eof_received()
            self._say_end()
        return False

    def pause_writing(self) -> None:
        self._is_full = True
        if self._above is not None:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        self._num_reply_bytes = 0
        if self._above is not None:
            self._above.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._rest = None
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
        """One step with what has come. ``Handshakes`` calls it."""
        if self._rest is None or self._has_ended or self._plain.is_closing():
            return
        if self._tls is None:
            if _A <= self._rest[0] <= _Z:
                self._refuse("plain HTTP: use https://", self._port.http_answer)
                return
            self._tls = self._port.context().wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._incoming.write(self._next_piece())
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._shake_on()
        except ssl.SSLError as error:
            self._refuse((error.reason or "nonsense").lower().replace("_", " "))
        else:
            self._agreed()

    def _shake_on(self) -> None:
        self._flush()
        if self._rest is not None:
            self._port.handshakes.enter(self)
        else:
            self._plain.resume_reading()

    def _agreed(self) -> None:
        self._flush()
        self._stop_timer()
        self._port.shaking.discard(self)
        self._port.clients.closed(self)
        self._above = self._port.new_protocol()
        self._above.connection_made(self)
        self._read(b"")  # A request may have come with the client's last word.
        self._read_slice()

    def _refuse(self, reason: str, answer: bytes = b"") -> None:
        """The client is told why, and gets a moment to read it."""
        self._port.on_refused(reason)
        self._flush()
        if answer:
            self._plain.write(answer)
        self._has_ended = True
        self._rest = None
        self._stop_timer()
        self._linger()
        self._plain.write_eof()
        self._plain.resume_reading()  # To hear of its end.

    def _shakes_too_long(self) -> None:
        if self._tls is not None and not self._has_ended:
            self._port.on_refused(f"no agreement within {self._port.handshake_timeout_s:g} s")
        self._has_ended = True
        self._plain.abort()

    def shutdown(self) -> None:
        """The router ends. uvicorn calls it, of a connection without a protocol."""
        self._has_ended = True
        self._plain.abort()

    # Decrypting.

    def _read_slice(self) -> None:
        ends_at = time.monotonic() + SLICE_S
        while self._rest is not None and not (self._is_paused or self._has_ended):
            self._read(self._next_piece())
            if time.monotonic() >= ends_at:
                break
        if self._has_ended:
            self._rest = None
        elif self._rest is not None:
            self._plain.pause_reading()
        self._go_on()

    def _next_piece(self) -> memoryview:
        assert self._rest is not None
        piece, self._rest = self._rest[: self._piece_bytes], self._rest[self._piece_bytes :] or None
        return piece

    def _go_on(self) -> None:
        """More is read, unless that is paused: first what has come already."""
        if self._is_paused or self._plain.is_closing():
            return
        if self._rest is None:
            self._plain.resume_reading()
        elif not self._is_due:  # The protocol above resumes after each piece: slices would follow each other at once.
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        """A bug of ours ends the connection, as the loop does where it has called us."""
        self._is_due = False
        try:
            self._read_slice()
        except BaseException:
            self.abort()
            raise

    def _read(self, data: bytes | memoryview) -> None:
        assert self._tls is not None
        begun_at = time.monotonic()
        self._incoming.write(data)
        parts, end = _decrypted(self._tls, self._incoming)
        if time.monotonic() - begun_at > SLICE_S:
            self._piece_bytes = COSTLY_PIECE_BYTES
        if self._outgoing.pending:
            self._reply()
        above = self._above
        if above is None:
            return
        if end is _End.BROKEN:  # What was whole goes nowhere: OpenSSL encrypts no answer to it any more.
            self._give_up()
            return
        if parts:
            above.data_received(b"".join(parts))
        if end is _End.ORDERLY:
            above.eof_received()
            self.close()

    def _reply(self) -> None:
        """TLS has something to say by itself."""
        if self._is_full:
            self._num_reply_bytes += self._outgoing.pending
        if self._num_reply_bytes > MAX_REPLY_BYTES:
            self.abort()
        else:
            self._flush()

    def _give_up(self) -> None:
        """The client's bytes are no TLS any more, which it has been told."""
        self._has_ended = True
        self._plain.close()
        self._linger()

    # What the protocol above asks for.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext" and self._tls is not None:
            return self._tls.context
        return self._plain.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Record by record: a ``MemoryBIO`` keeps the room of the most that it ever held, also while it is idle."""
        assert self._tls is not None
        for at in range(0, len(data), RECORD_BYTES):
            if self._has_ended:
                return
            self._tls.write(data[at : at + RECORD_BYTES])
            self._plain.write(self._outgoing.read())

    def get_write_buffer_size(self) -> int:
        return self._plain.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._plain.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._go_on()

    def is_closing(self) -> bool:
        return self._plain.is_closing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._say_end()
        self._plain.write_eof()

    def close(self) -> None:
        """Closed once all is sent. What ends with a reset has no orderly end: without one a client takes no answer for
        whole that was cut."""
        if not self._plain.is_closing():
            if self._ends_with_reset():
                self._has_ended = True
            self._say_end()
            self._plain.close()

    def abort(self) -> None:
        """Closed at once."""
        self._has_ended = True
        self._plain.abort()

    def _ends_with_reset(self) -> bool:
        linger = self._plain.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(_RESET))
        return bool(linger == _RESET)

    def _say_end(self) -> None:
        """The last record. The client's own is not waited for (RFC 8446, 6.1)."""
        if not self._has_ended and self._tls is not None:
            self._has_ended = True
            with suppress(ssl.SSLError):  # That the client has not said its own.
                self._tls.unwrap()
            self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._plain.write(self._outgoing.read())

    def _linger(self) -> None:
        """The connection ends by itself, or is cut off."""
        self._timer = asyncio.get_running_loop().call_later(self._port.linger_s, self._plain.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _decrypted(tls: ssl.SSLObject, incoming: ssl.MemoryBIO) -> tuple[list[bytes], _End]:
    """All that is whole of what has come. To ask for more than there is takes as long as to decrypt a request."""
    parts: list[bytes] = []
    try:
        while part := tls.read(RECORD_BYTES):
            parts.append(part)
            if not incoming.pending:
                return parts, _End.NONE
    except ssl.SSLWantReadError:
        return parts, _End.NONE
    except ssl.SSLZeroReturnError:
        return parts, _End.ORDERLY
    except ssl.SSLError:
        return parts, _End.BROKEN
    return parts, _End.ORDERLY
