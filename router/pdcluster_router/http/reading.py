"""Feeds a client's bytes to the parser, in pieces that delay no other client. Each request is parsed as it was sent.

This file makes up for three properties of httptools:

- When a client offers an ``Upgrade``, httptools takes the body for another protocol's bytes. We speak no other
  protocol, so the offer is ignored (RFC 9110, 7.8): a fresh parser reads such a head again, without the offer.
- Trailers come by the same call as headers. They are counted and dropped (RFC 9110, 6.5.1).
- httptools collects any number of bytes before it calls us (a value, a trailer, a chunk's extension). We count them.

Bytes that come while reading is paused (``flow.read_paused``) stay unparsed in ``_rest``: a row of short requests takes
ten times as much memory once it is parsed.

A subclass of uvicorn 0.54's ``HttpToolsProtocol``. Its own subclass handles whole heads, bodies and whole messages.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from pdcluster_router.core.apis.openai_errors import (
    ApiError,
    RefusedRequest,
    bad_request,
    headers_too_large,
    too_many_headers,
)
from pdcluster_router.core.apis.request_head import Headers, RequestHead, origin_form
from pdcluster_router.core.clients.proxy_protocol import Origin, Preface
from pdcluster_router.core.clients.room import Unread, without_used
from pdcluster_router.http.flow import Flow
from pdcluster_router.http.leavers import Leavers
from pdcluster_router.http.page_transport import PageTransport
from pdcluster_router.http.pauses import PausingProtocol
from pdcluster_router.http.slots import READING, Pipeline

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER of a connection that ends with a reset."""
SLICE_BYTES: Final = 64 << 10
"""The most bytes of one connection that are parsed in one turn of the loop. Other connections have turns in between."""

SLICE_S: Final = 0.002
"""After so many seconds no further piece is parsed in this turn: 64 KiB of the shortest requests, each answered at once
with an error, would take 70 ms, and 64 KiB of chunks of two bytes 10 ms."""

PIECE_BYTES: Final = 4 << 10
"""The parser gets so many bytes at a time if requests may begin in them, for it cannot be stopped within a piece. A
piece holds 160 of the shortest requests at most, 3 ms.

A body of known length is parsed a slice at a time: 7 MiB take 1.5 to 2.4 ms of CPU, at most 0.14 ms in a turn. In
chunks of 64 KiB, 7 MiB take 5.6 ms in pieces of 4 KiB, 2.5 ms in pieces of 16 KiB and 1.6 ms in pieces of 64 KiB, at
most 0.3 ms in a turn. Larger pieces would save less than they may cost: they hold 4 or 16 times as many requests.
"""

LINE_OBJECTS_BYTES: Final = 176
"""Python's cost of each header line: a name, a value, a pair and its place in two tables."""

MAX_HEADER_LINES: Final = 256
"""The most header lines of a request. 16,000 lines of three bytes fit into the bytes of a head. Clients that sent so
many stopped the loop for 117 ms; the likely cause is the garbage collector, which looks at each line's objects. Apache
takes 100 lines, and no client that we know sends more."""

REFUSAL_STATE: Final = "refusal"
"""Key in a page's state for the error that the client gets instead of the page's answer."""

_NO_HEADERS: Final[Headers] = []
"""Nothing is ever added to it: each message begins with a list of its own."""


class ReadingProtocol(PausingProtocol):
    """The reading side of one connection. Event loop only."""

    __slots__ = READING

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        leavers: Leavers,
        max_header_bytes: int,
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.pipeline = Pipeline()  # type: ignore[assignment]  # has all that is asked of the parent's deque
        self.idle_since = None
        self.headers = _NO_HEADERS
        self.is_in_head = True
        self.is_in_message = False
        self.is_deaf = False
        """Whether bytes that come are dropped, because the connection ends."""
        self.num_silent_bytes = 0
        """Bytes that have come since the last whole head, body byte or whole message. Between messages they are blank
        lines, which begin no message (RFC 9112, 2.2). A client may send some after its body.
        """
        self.begun_at = 0.0
        """When the first byte of the newest request came, monotonic seconds; only set at the client port."""
        self._is_internal = False  # Whether it came to the internal port; the subclass sets it.
        self.preface: Preface | None = None
        """The PROXY header of this connection, if the port requires one; set before ``connection_made``."""
        self._leavers = leavers
        self._max_header_bytes = max_header_bytes
        self._is_upgrade = False
        self._refusal: ApiError | None = None
        self._rest: memoryview | None = None
        self.unread: Unread
        """The room for ``_rest``; set in ``connection_made``."""
        self._flow: Flow  # The parent's ``flow``, by its own type.
        self._linger_timer: asyncio.TimerHandle | None = None

    # For the subclass to fill in.

    def head_is_whole(self) -> None:
        """A request has begun; its head is in ``url`` and ``headers``.

        Raises:
            RefusedRequest: The request is answered with this error, and the connection ends.
        """
        raise NotImplementedError

    def message_is_whole(self) -> None:
        raise NotImplementedError

    def has_read(self) -> None:
        """A piece of the bytes that have come is parsed."""
        raise NotImplementedError

    def no_room(self) -> ApiError:
        """The error for a client whose bytes find no room. Reports the failure."""
        raise NotImplementedError

    def num_body_bytes_left(self) -> int:
        """The number of next bytes that surely belong to a body; 0 or less: unknown."""
        raise NotImplementedError

    def refuse_the_rest(self, error: ApiError) -> None:
        """Answers with ``error``: no further request can be read on this connection."""
        raise NotImplementedError

    @property
    def is_full(self) -> bool:
        """Whether written bytes pile up because the client reads too slowly."""
        return self.flow.write_paused

    def now(self) -> float:
        """Monotonic seconds. Not the loop's time, which stands still within a turn."""
        return time.monotonic()

    # What the event loop says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the parent
        super().connection_made(transport)
        if self.preface is not None and self.preface.origin is not Origin.PROXY:
            self.client = self.preface.client
        self.flow = self._flow = Flow(transport, self._go_on, self._leavers)

    def data_received(self, data: bytes) -> None:
        if self.is_deaf:
            return
        if self._rest is not None:  # ``data`` was on its way when reading was paused.
            self._rest = memoryview(bytes(self._rest) + data)
            self._hold_rest()
        elif len(data) <= PIECE_BYTES:
            self._read(data)
        else:
            self._rest = memoryview(data)
            self._read_slice()

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer and no reference cycle outlives a connection. Otherwise thousands of connections a second would make
        the garbage collector's passes long, and no request goes on during a pass."""
        self._rest = None
        self.unread.release()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # The parent does so only where the client left in an orderly way.
        self._flow.end()

    def abort(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def end_with_reset(self) -> None:
        """A later ``close`` of the transport sends the written bytes, and then a reset in place of an orderly end."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # The client has not even taken its last answer.
        else:
            super().timeout_keep_alive_handler()

    def linger(self, seconds: float) -> None:
        """Cuts the connection off ``seconds`` after the first call of this, unless it has ended by then."""
        self._linger_timer = self._linger_timer or self.loop.call_later(seconds, self.transport.abort)

    def _read_slice(self) -> None:
        num_left, ends_at = SLICE_BYTES, self.now() + SLICE_S
        while self._rest is not None and num_left > 0 and not (self.flow.read_paused or self.is_deaf):
            num = min(num_left, max(PIECE_BYTES, self.num_body_bytes_left()))
            num_left -= num
            self._read(self._next_piece(self._rest, num))
            if self.now() >= ends_at:
                break
        if self._rest is not None and not self.is_deaf:
            self._hold_rest()
        if self.is_deaf:
            self._rest = None
            self.unread.release()
            if not self.transport.is_closing():
                self.transport.resume_reading()  # To notice the client's end.
        elif self._rest is not None:
            self.transport.pause_reading()
            self._go_on()
        elif num_left < SLICE_BYTES and not self.transport.is_closing():
            self._go_on()

    def _next_piece(self, rest: memoryview, num_bytes: int) -> bytes:
        self._rest = rest[num_bytes:] or None
        self.unread.looked_at(num_bytes)
        return bytes(rest[:num_bytes])

    def _hold_rest(self) -> None:
        """Takes room for the bytes that wait. Refuses the client if there is none."""
        if self._rest is None:
            self.unread.release()
        elif self.unread.hold(len(self._rest)):
            self._rest = without_used(self._rest)
        else:
            self._rest = None
            self.refuse(self.no_room())

    def _go_on(self) -> None:
        """Reads on, unless reading is paused: first the bytes that have come already."""
        if self.flow.read_paused:
            return
        if self._rest is not None:
            self.loop.call_soon(self._read_slice)
        else:
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        self.idle_since = None
        self.num_silent_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._feed_after(upgrade, data)
        except httptools.HttpParserError:
            self.refuse(self._refusal or bad_request("the request is not valid HTTP", "invalid_http"))
            return
        if self.num_silent_bytes > self._max_header_bytes:
            self.refuse(headers_too_large(self._max_header_bytes))
        elif self.is_in_message and len(self.headers) > MAX_HEADER_LINES:
            self.refuse(too_many_headers(MAX_HEADER_LINES))
        else:
            self.has_read()

    def refuse(self, error: ApiError) -> None:
        """Answers ``error`` to a client whose bytes are invalid or too many. Nothing more is read."""
        self.is_deaf = True
        self.stop_reading()
        self.refuse_the_rest(error)

    def stop_reading(self) -> None:
        """Nothing waits for the rest of the request any more."""
        self.is_in_message = False

    def _feed_after(self, upgrade: httptools.HttpParserUpgrade, data: bytes) -> None:
        while True:
            data = data[upgrade.args[0] :]
            self._begin_again()
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as another:
                upgrade = another
            else:
                return

    def _begin_again(self) -> None:
        """Reads the head that offered an upgrade anew, without the offer."""
        head = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self._is_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        begun_at = self.begun_at
        self.parser.feed_data(head)
        self.begun_at = begun_at  # The head began when it came, not now.
        self.parser.feed_data(b"".join(lines) + b"\r\n")

    def num_head_bytes(self) -> int:
        """The most memory of the head that is being read: at least that of a piece, which may hold body too."""
        return max(self.num_silent_bytes, PIECE_BYTES) + LINE_OBJECTS_BYTES * len(self.headers)

    # What the parser says.

    def on_message_begin(self) -> None:
        # The parent would make a scope here. Only ASGI needs a scope: ``cold_head`` makes one.
        self.url = b""
        self.headers = []
        self.is_in_message = True
        if not self._is_internal:
            self.begun_at = time.monotonic()
        self.idle_since = None  # One read may end a request, begin a pause, and begin the next request.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:  # Else it is a trailer, which is dropped; ``num_silent_bytes`` bounds trailers.
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.num_silent_bytes > self._max_header_bytes:
            self._check_head_bytes()
        if len(self.headers) > MAX_HEADER_LINES:
            raise self._refused(too_many_headers(MAX_HEADER_LINES))
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._is_upgrade = True  # The parser now ends this message, and says so.
            return
        try:
            self.head_is_whole()
        except RefusedRequest as refused:
            raise self._refused(refused.error) from refused
        self.is_in_head = False
        self.num_silent_bytes = 0
        self.url, self.headers = b"", _NO_HEADERS  # Else a connection would keep them while it is idle.

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self.is_in_message = False
        self.is_in_head = True
        self.num_silent_bytes = 0
        self.message_is_whole()

    def cold_head(self, head: RequestHead) -> None:
        """Gives the request to uvicorn, which gets its body and end too."""
        url = origin_form(self.url)
        super().on_message_begin()
        self.url, self.expect_100_continue = url, head.expects_continue
        self.headers.extend(head.headers)  # The scope holds this very list.
        super().on_headers_complete()
        self.cycle.transport = PageTransport(self.transport)  # type: ignore[assignment]  # all that a cycle asks of one

    def drop_unread_page(self, error: ApiError) -> bool:
        """Ends a page whose body is being read. Returns True if it is the page's turn and its answer has not begun: the
        client then gets ``error`` instead of the page's answer.
        """
        page: RequestResponseCycle | None = self.cycle
        if not isinstance(page, RequestResponseCycle) or not page.more_body:
            return False
        if page.response_started:
            page.keep_alive = False  # This answer is the last one.
            return False
        page.disconnected = True
        page.waiting_for_100_continue = False  # Else uvicorn would write 100 Continue behind the end of the connection.
        page.message_event.set()
        if not self.pipeline:
            page.scope["state"][REFUSAL_STATE] = error
            return True
        self.pipeline.popleft()  # The page is the newest, and waits.
        return False

    def cold_body(self, body: bytes) -> None:
        if self.cycle is not None:  # None: the page has not waited for it.
            super().on_body(body)

    def cold_message_complete(self) -> None:
        if self.cycle is not None:
            super().on_message_complete()
        else:  # The page was answered before the end of its request.
            self.begin_pause()

    def _check_head_bytes(self) -> None:
        # The last read may have brought body as well: count exactly.
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._max_header_bytes:
            raise self._refused(headers_too_large(self._max_header_bytes))

    def _refused(self, error: ApiError) -> ValueError:
        """An exception to raise through the parser: it stops the parser, and the client gets ``error``."""
        self._refusal = error
        return ValueError(error.message)
