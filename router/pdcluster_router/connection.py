"""One HTTP/1.1 connection to an engine, and one call on it.

    IDLE --send()--> BUSY --response complete, keep-alive--> IDLE
                      |
                      +--response complete, no keep-alive | error | close()--> CLOSED

Decides nothing about requests; says what came back. All of it runs in the event loop's callbacks: no task
per request, because a task and its wake-ups cost more than all the rest of a relayed request
(measured: 12,000 against 22,000 requests/s per core).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import httptools

MAX_HEADER_BYTES: Final = 64 << 10
"""An engine that sends more header bytes than this is broken."""

_BYTES_ACKED: Final = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in Linux' ``struct tcp_info``: bytes that the peer's kernel took, and one for the SYN."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers of an engine's response. ``content_length``: bytes, None when chunked."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content_length: int | None
    content_type: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """Why there will be no (more) response."""

    reason: str
    is_unsent: bool = False
    """No byte of the request can have reached the engine."""
    is_stale: bool = False
    """An idle connection was found closed: the engine had hung up before the request could reach it."""


class ResponseSink(Protocol):
    """Who made a call. Exactly one of ``on_end`` and ``on_lost`` comes, last; nothing comes after ``Call.close``."""

    def on_head(self, head: ResponseHead) -> None: ...

    def on_body(self, body: bytes) -> None:
        """Some bytes of the body, at least one: all that one read brought."""
        ...

    def on_end(self) -> None: ...

    def on_lost(self, lost: Lost) -> None: ...


class Call:
    """One request to an engine and its response. Owned by whoever sent it."""

    __slots__ = ("_cancel_connect", "connection", "is_closed", "sink")

    def __init__(self, sink: ResponseSink) -> None:
        self.sink = sink
        self.is_closed = False
        self.connection: Connection | None = None
        self._cancel_connect: Callable[[], object] | None = None

    def connecting(self, cancel: Callable[[], object]) -> None:
        """There is no connection yet; ``cancel`` gives it up."""
        self._cancel_connect = cancel

    def close(self) -> None:
        """The engine sees the connection close, which is how vLLM aborts a request. The sink hears nothing more."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.connection is not None:
            self.connection.abort()
        elif self._cancel_connect is not None:
            self._cancel_connect()

    def pause(self) -> None:
        """No more of the response is read until ``resume``."""
        if not self.is_closed and self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if not self.is_closed and self.connection is not None:
            self.connection.resume()

    def fail(self, lost: Lost) -> None:
        """The call is over without a (whole) response."""
        if not self.is_closed:
            self.is_closed = True
            self.sink.on_lost(lost)


class ConnectionOwner(Protocol):
    """The pool that a connection belongs to."""

    def released(self, connection: Connection) -> None:
        """The connection can take another call."""
        ...

    def closed(self, connection: Connection) -> None:
        """The connection is gone. Comes exactly once."""
        ...


class Connection(asyncio.Protocol):
    """One connection. Owned by its pool, lent to one call at a time."""

    def __init__(self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_since = 0.0
        self._owner = owner
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._transport: asyncio.Transport | None = None
        self._num_sent_bytes = 0
        self._is_unread = False
        self._is_paused = False
        self._incoming = _Incoming()

    # What the pool and the call do.

    @property
    def is_usable(self) -> bool:
        """Whether it is open, as far as this side knows."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, call: Call) -> None:
        """The request is on its way; the response goes to ``call``. Only while idle."""
        assert self._call is None
        if self._transport is None or self._transport.is_closing():
            self._loop.call_soon(call.fail, Lost("the engine closed the new connection", is_unsent=True))
            return
        self._call, call.connection = call, self
        self._num_sent_bytes += len(request)
        self._incoming = _Incoming()
        self._transport.write(request)

    def abort(self) -> None:
        """Closed at once, whatever is unsent or unread."""
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

    def data_received(self, data: bytes) -> None:
        if self._call is None:
            self.abort()  # Nobody asked: this connection cannot be trusted with the next request.
            return
        self._incoming.has_bytes = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(f"not an HTTP response: {error.__context__ or error}")
        else:
            self._deliver()

    def eof_received(self) -> None:
        self._is_unread = self._transport is not None and _is_unread(self._transport, self._num_sent_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.closed(self)
        self._lose(f"the connection was closed ({exc or 'end of stream'})")

    # What the parser says, in the course of data_received.

    def on_message_begin(self) -> None:
        self._incoming.num_messages += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._incoming.num_messages == 1:
            self._incoming.add_header(name.lower(), value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._incoming.num_messages == 1:
            self._incoming.head = self._incoming.finish_head(status)

    def on_body(self, body: bytes) -> None:
        if self._incoming.num_messages == 1:
            self._incoming.parts.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._incoming = _Incoming(has_bytes=True)
        elif not self._incoming.is_complete:
            self._incoming.is_complete = True
            self._incoming.can_keep = self._parser.should_keep_alive()

    def _deliver(self) -> None:
        """Hand on what one read brought: head, body, end. The sink may close the call at any of them."""
        call = self._call
        assert call is not None
        head, parts, is_complete = self._incoming.take()
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
        """Back to the pool before the sink hears of the end, so that what it sends next can go this way."""
        call, self._call = self._call, None
        if call is not None:
            call.connection = None
        self.resume()
        if self._incoming.can_keep and self._incoming.num_messages == 1:
            self._owner.released(self)
        else:
            self.abort()

    def _lose(self, reason: str) -> None:
        call, self._call = self._call, None
        self.abort()
        if call is None:
            return
        call.connection = None
        call.fail(Lost(reason, is_stale=self._is_unread and not self._incoming.has_bytes))


def _is_unread(transport: asyncio.Transport, num_sent_bytes: int) -> bool:
    """Whether the peer hung up before the last bytes could reach it.

    Its FIN acknowledges all that its kernel had by then. What that does not cover came to a closed socket,
    so no program can have read it. Only for an orderly end: a reset says nothing about what was read.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    tcp_info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    if len(tcp_info) < _BYTES_ACKED.size:
        return False
    num_acked: int = _BYTES_ACKED.unpack(tcp_info)[0]
    return 0 < num_acked < num_sent_bytes + 1


class _Incoming:
    """What has come of one response. Owned by its connection."""

    __slots__ = (
        "can_keep",
        "content_length",
        "content_type",
        "has_bytes",
        "head",
        "headers",
        "is_chunked",
        "is_complete",
        "num_header_bytes",
        "num_messages",
        "parts",
    )

    def __init__(self, *, has_bytes: bool = False) -> None:
        self.has_bytes = has_bytes
        self.num_messages = 0
        """Responses that have begun: more than one is one that nobody asked for."""
        self.num_header_bytes = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_length: int | None = None
        self.content_type = b""
        self.is_chunked = False
        self.head: ResponseHead | None = None
        self.parts: list[bytes] = []
        self.is_complete = False
        self.can_keep = False

    def add_header(self, name: bytes, value: bytes) -> None:
        """Keep one header.

        Raises:
            ValueError: They are too large.
        """
        self.num_header_bytes += len(name) + len(value)
        if self.num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"more than {MAX_HEADER_BYTES} bytes of headers")
        if name == b"content-length":
            self.content_length = int(value)
        elif name == b"content-type":
            self.content_type = value
        elif name == b"transfer-encoding":
            self.is_chunked = True
        self.headers.append((name, value))

    def finish_head(self, status: int) -> ResponseHead:
        """Status and headers.

        Raises:
            ValueError: They do not say where the body ends, so an end could not be told from a cut.
        """
        if not self.is_chunked and self.content_length is None and status not in (204, 304):
            raise ValueError("neither Content-Length nor chunked")
        return ResponseHead(status, self.headers, self.content_length, self.content_type)

    def take(self) -> tuple[ResponseHead | None, list[bytes], bool]:
        """Head and body parts since the last call, and whether that is all."""
        head, self.head = self.head, None
        parts, self.parts = self.parts, []
        return head, parts, self.is_complete
