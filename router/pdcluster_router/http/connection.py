"""One HTTP/1.1 connection to an engine, and one call on it.

    IDLE --send()--> BUSY --response complete, keep-alive--> IDLE
                      |
                      +--response complete, no keep-alive | error | close()--> CLOSED

Decides nothing about requests; reports what came back. All code runs in callbacks of the event loop. A task per
request, with its wake-ups, would cost more than all the rest of a relayed request (measured: 12,000 against 22,000
requests/s per core).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import httptools
import msgspec

from pdcluster_router.core.apis.request_head import without_hop
from pdcluster_router.http.records import NUM_WRITTEN_BYTES

MAX_HEADER_BYTES: Final = 64 << 10
"""An engine that sends more header bytes than this is broken."""

JOINED_BYTES: Final = 64 << 10
"""A request of up to so many bytes is written as one piece; the parts of a longer request are not copied."""

Request: TypeAlias = Sequence[bytes | memoryview]
"""A request as it goes over the wire, in parts whose bytes never change."""

_LINE_BYTES: Final = 4
"""The bytes of a header line besides its name and value."""

_BYTES_ACKED: Final = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in Linux' ``struct tcp_info``: bytes that the peer's kernel took, and one for the SYN."""


class ResponseHead(msgspec.Struct, frozen=True):
    """Status and headers of an engine's response. ``content_length``: bytes, None when chunked."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content_length: int | None
    content_type: bytes


@dataclass(frozen=True, slots=True)
class ResponseLost:
    """Why no response, or no rest of a response, will come."""

    reason: str
    is_unsent: bool = False
    """No byte of the request can have reached the engine."""
    is_stale: bool = False
    """An idle connection was found closed: the engine had hung up before the request could reach it."""
    is_ours: bool = False
    """The cause is a limit of this router, or may be the client: the loss says nothing of the engine."""
    is_untrusted: bool = False
    """There is no agreement on TLS, so the loss says nothing of the engine's core."""
    may_be_told: bool = False
    """A cut may be how the engine tells an error: it had begun a stream before it knew whether the request works."""
    has_large_head: bool = False
    """The engine has begun to answer, with more headers than this router takes: another engine would do the same."""
    error_number: int = 0
    """The operating system's error number if no connection could be made; 0: it named none."""


class Cut(Exception):  # given to ``connection_lost``, never raised
    """Why the layer below a connection has ended it."""

    def __init__(self, lost: ResponseLost) -> None:
        super().__init__(lost.reason)
        self.lost = lost


class ResponseSink(Protocol):
    """The receiver of a response. Its last method call is ``on_end`` or ``on_lost``; none follows ``Call.close``."""

    def on_head(self, head: ResponseHead) -> None: ...

    def on_body(self, body: bytes) -> None:
        """All bytes of the body that one read brought, at least one."""
        ...

    def on_end(self) -> None: ...

    def on_lost(self, lost: ResponseLost) -> None: ...


class Call:
    """One request to an engine and its response. Owned by its sender."""

    __slots__ = ("cancel_connect", "connection", "is_closed", "sink")

    def __init__(self, sink: ResponseSink) -> None:
        self.sink = sink
        self.is_closed = False
        self.connection: Connection | None = None
        self.cancel_connect: Callable[[], object] | None = None
        """Stops to make a connection; None: none is being made."""

    def close(self) -> None:
        """Closes the connection, whereupon vLLM aborts the request. No method of the sink is called any more."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.connection is not None:
            self.connection.abort()
        elif self.cancel_connect is not None:
            # Not kept: a cancelled task keeps its last frame, which refers to us, and the body would wait for gc.
            cancel, self.cancel_connect = self.cancel_connect, None
            cancel()

    def pause(self) -> None:
        """No more of the response is read until ``resume``."""
        if not self.is_closed and self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if not self.is_closed and self.connection is not None:
            self.connection.resume()

    def fail(self, lost: ResponseLost) -> None:
        """The call is over without a (whole) response."""
        if not self.is_closed:
            self.is_closed = True
            self.sink.on_lost(lost)


class Connection(asyncio.Protocol):
    """One connection. Owned by its pool, lent to one call at a time."""

    def __init__(
        self,
        on_released: Callable[[Connection], None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        """``on_released``: called when it can take another call. ``on_closed``: called once, when it is lost."""
        self.idle_since = 0.0
        self._on_released = on_released
        self._on_closed = on_closed
        self._parser: httptools.HttpResponseParser
        """Exists as long as the connection. It refers to us, so the two are a reference cycle for that time."""
        self._call: Call | None = None
        self._transport: asyncio.Transport | None = None
        self._num_sent_bytes = 0
        self._is_unread = False
        self._is_paused = False
        self._incoming = _PartialResponse()

    # What the pool and the call do.

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open, as far as this side knows."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: Request, call: Call) -> None:
        """Sends the request; the response goes to ``call``. The connection must be idle and usable."""
        assert self._call is None
        assert self._transport is not None
        self._call, call.connection = call, self
        num_bytes = sum(map(len, request))
        self._num_sent_bytes += num_bytes
        self._incoming = _PartialResponse()
        if num_bytes <= JOINED_BYTES:
            self._transport.write(b"".join(request))
        else:
            self._transport.writelines(request)  # Not copied: uvloop keeps the parts that the socket does not take yet.

    def abort(self) -> None:
        """Closes the connection at once, whatever is unsent or unread."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    # What the event loop says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if self._call is None:
            self.abort()  # Bytes without a request: the connection cannot be trusted with the next one.
            return
        self._incoming.num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._incoming.is_complete:
                self._lose_unread(str(error.__context__ or error))
                return
            self._incoming.can_keep = False  # The response is whole; no request asked for the bytes behind it.
        incoming = self._incoming
        if incoming.parts or incoming.head is not None or incoming.is_complete:
            self._deliver(incoming)
        elif incoming.is_silent(len(data)):
            self._lose_unread(f"more than {MAX_HEADER_BYTES} bytes without an answer")

    def eof_received(self) -> None:
        if (transport := self._transport) is not None:
            num_sent = transport.get_extra_info(NUM_WRITTEN_BYTES, self._num_sent_bytes)
            self._is_unread = _is_unread(transport, num_sent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed(self)
        self._lose(f"the connection was closed ({exc or 'end of stream'})", exc.lost if isinstance(exc, Cut) else None)
        del self._parser  # Else the reference cycle would wait for the garbage collector.

    # What the parser says, in the course of data_received.

    def on_message_begin(self) -> None:
        self._incoming.num_messages += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._incoming.has_whole_head:
            self._incoming.drop_trailer(name, value)
        else:
            self._incoming.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100:
            raise ValueError(f"status {status}")
        if status >= 200 and self._incoming.num_messages == 1:
            self._incoming.head = self._incoming.finish_head(status)

    def on_body(self, body: bytes) -> None:
        if self._incoming.num_messages == 1:
            self._incoming.parts.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._incoming = _PartialResponse(self._incoming.num_bytes)
        elif not self._incoming.is_complete:
            self._incoming.is_complete = True
            self._incoming.can_keep = self._parser.should_keep_alive()

    def _deliver(self, incoming: _PartialResponse) -> None:
        """Gives the sink the head, body and end that one read brought. The sink may close the call after each."""
        call = self._call
        assert call is not None
        head, incoming.head = incoming.head, None
        parts, incoming.parts = incoming.parts, []
        is_complete = incoming.is_complete
        incoming.num_silent_bytes = 0
        if is_complete:
            self._release()
        if head is not None and not call.is_closed:
            call.sink.on_head(head)
        if parts and not call.is_closed:
            call.sink.on_body(parts[0] if len(parts) == 1 else b"".join(parts))
        if is_complete and not call.is_closed:
            call.is_closed = True
            call.sink.on_end()

    def _release(self) -> None:
        """Gives the connection back before the sink's ``on_end``, so that the sink's next request can use it."""
        call, self._call = self._call, None
        if call is not None:
            call.connection = None
        if self._is_paused:
            self.resume()
        if self._incoming.can_keep and self._incoming.num_messages == 1:
            self._on_released(self)
        else:
            self.abort()

    def _lose_unread(self, problem: str) -> None:
        has_large_head = self._incoming.has_large_head
        reason = _TOO_LARGE if has_large_head else f"not an HTTP response: {problem}"
        self._lose(reason, ResponseLost(reason, has_large_head=has_large_head))

    def _lose(self, reason: str, lost: ResponseLost | None = None) -> None:
        call, self._call = self._call, None
        self.abort()
        if call is None:
            return
        call.connection = None
        call.fail(lost or ResponseLost(reason, is_stale=self._is_unread and not self._incoming.num_bytes))


def _is_unread(transport: asyncio.Transport, num_sent_bytes: int) -> bool:
    """Whether the peer hung up before the last bytes could reach it.

    The peer's FIN acknowledges all bytes that its kernel had by then. Later bytes came to a closed socket, so no
    program can have read them. Only for an orderly end: a reset says nothing about what was read.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    tcp_info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    if len(tcp_info) < _BYTES_ACKED.size:
        return False
    num_acked: int = _BYTES_ACKED.unpack(tcp_info)[0]
    return 0 < num_acked < num_sent_bytes + 1


class _PartialResponse:
    """The part of one response that has come so far. Owned by its connection."""

    __slots__ = (
        "can_keep",
        "has_whole_head",
        "head",
        "headers",
        "is_complete",
        "num_bytes",
        "num_header_bytes",
        "num_messages",
        "num_silent_bytes",
        "parts",
    )

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        """All bytes that have come, interim responses included."""
        self.num_messages = 0
        """Responses that have begun. No request has asked for a second one."""
        self.num_header_bytes = 0
        """Bytes of headers and trailers; 0 before the first trailer."""
        self.num_silent_bytes = 0
        """Bytes that have come since the last head, body byte or end."""
        self.has_whole_head = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.head: ResponseHead | None = None
        self.parts: list[bytes] = []
        self.is_complete = False
        self.can_keep = False

    @property
    def has_large_head(self) -> bool:
        """Whether headers have come, and no end of them within the limit."""
        is_large = max(_size_of(self.headers), self.num_silent_bytes) > MAX_HEADER_BYTES
        return is_large and self.num_messages == 1 and bool(self.headers) and not self.has_whole_head

    def finish_head(self, status: int) -> ResponseHead:
        """Status and headers.

        Raises:
            ValueError: The headers are too large, or do not say where the body ends: a cut would look like the end.
        """
        # ``num_bytes`` may count some of the body too, so headers are counted exactly if it is too much.
        if self.num_bytes > MAX_HEADER_BYTES and _size_of(self.headers) > MAX_HEADER_BYTES:
            raise ValueError(_TOO_LARGE)
        fields = dict(self.headers)
        length = fields.get(b"content-length")
        if length is None and b"transfer-encoding" not in fields and status not in (204, 304):
            raise ValueError("neither Content-Length nor chunked")
        self.has_whole_head = True
        return ResponseHead(
            status,
            without_hop(self.headers) if b"connection" in fields else self.headers,
            None if length is None else int(length),
            fields.get(b"content-type", b""),
        )

    def drop_trailer(self, name: bytes, value: bytes) -> None:
        """Drops a trailer, which is no header (RFC 9110, 6.5.1). Its bytes count as a header's do.

        Raises:
            ValueError: Headers and trailers are too large.
        """
        before = self.num_header_bytes or _size_of(self.headers)
        self.num_header_bytes = before + len(name) + len(value) + _LINE_BYTES
        if self.num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError(_TOO_LARGE)

    def is_silent(self, num_bytes: int) -> bool:
        """Counts bytes that brought no head, body or end, such as an endless trailer. Returns True above the limit."""
        self.num_silent_bytes += num_bytes
        return self.num_silent_bytes > MAX_HEADER_BYTES


def _size_of(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + _LINE_BYTES for name, value in headers)


_TOO_LARGE: Final = f"more than {MAX_HEADER_BYTES} bytes of headers"
