"""TLS between a socket and the protocol above: decrypts the bytes that come, and encrypts the protocol's bytes.

    SHAKING --agreed--> OPEN --close(), write_eof(), the peer's end, nonsense--> ENDED
       +--no agreement, too slow, left--> reported once, closed

Records are made and read in memory (``ssl.SSLObject``) on top of the loop's plain connection, not by the loop's own
TLS. So the promises of a plain connection hold. Between the socket and the protocol lie one read of the loop (256 KiB)
and half a record at most, so reading and writing pause as if there were no TLS. An end is written at once, while the
loop's own TLS waits for the peer's end, and cannot end one direction alone.

Both sides of the router use it: ``tls.py`` for clients, ``engine_tls.py`` for engines. These two files decide how an
agreement is reached, and what becomes of a connection without one.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, Final

from pdcluster_router.http.handshakes import SLICE_S

RECORD_BYTES: Final = 16 << 10
"""The most that a record holds."""
PIECE_BYTES: Final = 16 << 10
"""The most bytes that are decrypted at a time, for OpenSSL cannot be stopped within a piece."""
COSTLY_PIECE_BYTES: Final = 1 << 10
"""The same for a connection that has once taken longer than ``SLICE_S`` for a piece: 16 KiB of KeyUpdates take up to
30 ms, 16 KiB of a body 20 us."""
MAX_REPLY_BYTES: Final = 4 << 10
"""TLS itself answers some of a peer's messages. A peer that reads nothing gets at most so many bytes of answers."""
MAX_HANDSHAKE_BYTES: Final = 256 << 10
"""The most bytes of a peer up to the agreement, with the rest of the last piece. The longest handshake has
certificates, of which OpenSSL takes 100 KiB. Two of the largest ClientHello and skipped data are 48 KiB more."""
NUM_WRITTEN_BYTES: Final = "num_written_bytes"
"""A name for ``get_extra_info``: the bytes of all records up to the last record with bytes of the protocol above. TLS
itself may have written more since, which may be lost although the peer has read all of the protocol's bytes."""
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER of a connection that ends with a reset."""


class HandshakeTooLongError(ssl.SSLError):
    """The peer has sent more than ``MAX_HANDSHAKE_BYTES`` without an agreement."""

    def __init__(self) -> None:
        super().__init__(ssl.SSL_ERROR_SSL, "handshake too long")
        self.reason = "HANDSHAKE_TOO_LONG"


class _End(Enum):
    """Whether the peer's bytes end here, if all of them are TLS."""

    NONE = 0
    """They go on."""
    ORDERLY = 1


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """One connection: the loop's protocol, and the transport of the protocol above. Event loop only."""

    def __init__(self) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        """None: the handshake has not begun."""
        self._above: asyncio.Protocol | None = None
        """None: there is no agreement yet, or the connection is lost."""
        self._plain: asyncio.Transport
        self._rest: memoryview | None = None
        """Bytes that have come and are not decrypted yet."""
        self._is_paused = False
        """Whether the protocol above has paused reading."""
        self._is_full = False
        """Whether written bytes pile up because the peer reads too slowly."""
        self._is_due = False
        """Whether more is decrypted in the loop's next turn."""
        self._has_ended = False
        """Whether this side has ended the connection: bytes that come are dropped."""
        self._num_handshake_bytes = 0
        self._num_reply_bytes = 0
        self._num_written_bytes = 0
        """All bytes of records that were written to the socket."""
        self._num_written_for_above = 0
        """``_num_written_bytes`` after the last write of the protocol above."""
        self._piece_bytes = PIECE_BYTES

    def shake(self) -> None:
        """One step of the handshake with what has come. ``Handshakes`` calls it."""
        raise NotImplementedError

    def _wants_turn(self) -> None:
        """Asks for a turn of ``shake``."""
        raise NotImplementedError

    # What the event loop says.

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        if self._rest is not None:  # It was on its way when reading was paused.
            self._rest = memoryview(bytes(self._rest) + data)
            self._hold_rest()
        elif self._above is not None and len(data) <= self._piece_bytes:
            self._read(data)
        else:
            self._rest = memoryview(data)
            if self._above is not None:
                self._read_slice()
            else:
                self._plain.pause_reading()
                self._hold_rest()
                self._wants_turn()

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

    # The handshake.

    def _step(self, num_bytes: int = PIECE_BYTES) -> bool:
        """Takes one step. Returns whether there is an agreement. ``num_bytes``: the most bytes to read of ``_rest``.

        Raises:
            ssl.SSLError: The handshake has failed.
        """
        assert self._tls is not None
        if self._rest is not None:
            piece = self._next_piece(num_bytes)
            self._num_handshake_bytes += len(piece)
            self._incoming.write(piece)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._has_said(self._flush())
            if self._num_handshake_bytes > MAX_HANDSHAKE_BYTES:
                raise HandshakeTooLongError from None
            if self._rest is not None:
                self._wants_turn()
            else:
                self._plain.resume_reading()
            return False
        self._flush()
        return True

    def _has_said(self, records: bytes) -> None:
        """Called when ``records``, which may be empty, are written and the peer has the next step. For a subclass."""

    def _open_to(self, above: asyncio.Protocol) -> None:
        """There is an agreement: ``above`` has the connection now."""
        self._above = above
        above.connection_made(self)
        self._has_opened_to(above)
        self._read(b"")  # Bytes may have come with the peer's last message.
        self._read_slice()

    def _has_opened_to(self, above: asyncio.Protocol) -> None:
        """``above`` knows its connection, and has read nothing yet. For a subclass."""

    # Decrypting.

    def _read_slice(self) -> None:
        ends_at = time.monotonic() + SLICE_S
        while self._rest is not None and not (self._is_paused or self._has_ended):
            self._read(self._next_piece(self._piece_bytes))
            if time.monotonic() >= ends_at:
                break
        if self._has_ended:
            self._rest = None
        elif self._rest is not None:
            self._plain.pause_reading()
        self._hold_rest()
        self._go_on()

    def _hold_rest(self) -> None:
        """Called when bytes may wait in ``_rest``. For a subclass, which may count them."""

    def _next_piece(self, num_bytes: int) -> memoryview:
        assert self._rest is not None
        piece, self._rest = self._rest[:num_bytes], self._rest[num_bytes:] or None
        return piece

    def _go_on(self) -> None:
        """Reads on, unless reading is paused: first the bytes that have come already."""
        if self._is_paused or self._plain.is_closing():
            return
        if self._rest is None:
            self._plain.resume_reading()
        elif not self._is_due:  # The protocol above resumes after each piece: slices would follow each other at once.
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        """Reads the next slice. A bug of ours ends the connection, as in calls that the loop makes itself."""
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
        if isinstance(end, ssl.SSLError):  # ``parts`` is dropped: OpenSSL would encrypt no answer to it.
            self._give_up(end)
            return
        if parts:
            above.data_received(b"".join(parts))
        if end is _End.ORDERLY:
            above.eof_received()
            self._peer_ended()

    def _reply(self) -> None:
        """Sends what TLS itself answers, or cuts off a peer that reads none of it."""
        if self._is_full:
            self._num_reply_bytes += self._outgoing.pending
        if self._num_reply_bytes > MAX_REPLY_BYTES:
            self.abort()
        else:
            self._flush()

    def _give_up(self, error: ssl.SSLError) -> None:
        """Ends a connection whose peer sends bytes that are not TLS, or an alert. ``error`` says which."""
        raise NotImplementedError

    def _peer_ended(self) -> None:
        """The peer has ended in order: closes the connection once all that was written is sent."""
        self.close()

    # What the protocol above asks for.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext" and self._tls is not None:
            return self._tls.context
        if name == NUM_WRITTEN_BYTES:
            return self._num_written_for_above
        return self._plain.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts record by record: a ``MemoryBIO`` keeps the most memory that it ever used, also while it is idle."""
        assert self._tls is not None
        for at in range(0, len(data), RECORD_BYTES):
            if self._has_ended:
                return
            self._tls.write(data[at : at + RECORD_BYTES])
            self._flush()
        self._num_written_for_above = self._num_written_bytes

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Writes one after the other: a large body is not copied to join it with its head."""
        for data in list_of_data:
            self.write(data)

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
        """Closes the connection once all is sent. A connection that ends with a reset gets no end of TLS, so that no
        client takes a cut answer for whole."""
        if not self._plain.is_closing():
            if self._ends_with_reset():
                self._has_ended = True
            self._say_end()
            self._plain.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._has_ended = True
        self._plain.abort()

    def _ends_with_reset(self) -> bool:
        linger = self._plain.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(_RESET))
        return bool(linger == _RESET)

    def _say_end(self) -> None:
        """Writes the last record, and does not wait for the peer's (RFC 8446, 6.1)."""
        if not self._has_ended and self._tls is not None:
            self._has_ended = True
            with suppress(ssl.SSLError):  # It says that the peer's last record is missing.
                self._tls.unwrap()
            self._flush()

    def _flush(self) -> bytes:
        """Writes the records that there are. Returns them."""
        if not self._outgoing.pending:
            return b""
        records = self._outgoing.read()
        self._num_written_bytes += len(records)
        self._plain.write(records)
        return records


def _decrypted(tls: ssl.SSLObject, incoming: ssl.MemoryBIO) -> tuple[list[bytes], _End | ssl.SSLError]:
    """The decrypted bytes of the whole records that have come, and how they end. Asks OpenSSL for no more than there
    is: that would take as long as to decrypt a request."""
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
    except ssl.SSLError as error:
        return parts, error
    return parts, _End.ORDERLY
