"""The client side of the router: uvicorn's HTTP protocol with a short way for the hot paths.

    bytes --> httptools --> hot path?  yes --> HotCycle --> Router.dispatch    (no ASGI, no task)
                                       no  --> uvicorn as ever --> FastAPI

A subclass of uvicorn 0.54's ``HttpToolsProtocol``: it keeps reading, pipelining, keep-alive and shutdown; this
file decides what is hot, bounds what a client may send, and how long it may take. One uvicorn request costs
about 100 us in FastAPI; a hot one about 40 us with all three of its legs.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdcluster_router.core.openai_errors import (
    ApiError,
    bad_request,
    body_too_large,
    client_too_slow,
    headers_too_large,
)
from pdcluster_router.cycle import HotCycle
from pdcluster_router.router import Router

MAX_PIPELINED: Final = 8
"""Requests that may wait on one connection before we stop reading from it."""

ROUTER_STATE: Final = "router"
"""Key of the router in the state that the application's lifespan yields."""


class RouterProtocol(HttpToolsProtocol):
    """One client connection. Event loop only."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._router: Router = app_state[ROUTER_STATE]
        self._active: HotCycle | None = None  # Whose turn it is to answer, if it is a hot one.
        self._incoming: HotCycle | None = None  # Whose body is being read, if it is a hot one.
        self._read_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._is_in_head = True
        self._is_in_message = False
        self._is_ending = False
        self._refusal: ApiError | None = None

    # What the event loop says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the parent
        super().connection_made(transport)
        self._start_read_timer()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_in_head:
            self._num_head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # Only WebSockets upgrade, and we have none; uvicorn answers as if nobody had asked.
        except httptools.HttpParserError:
            self.send_400_response("the request is not valid HTTP")
            return
        if self._is_in_head and self._num_head_bytes > self._router.settings.max_header_bytes:
            self._refusal = headers_too_large(self._router.settings.max_header_bytes)
            self.send_400_response("")
        self._watch_the_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        active, self._active, self._incoming = self._active, None, None
        super().connection_lost(exc)
        self.pipeline.clear()
        if active is not None:
            active.gone()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._active is not None and self._active.owner is not None:
            self._active.owner.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._active is not None and self._active.owner is not None:
            self._active.owner.resume()

    # What the parser says, in the course of data_received.

    def on_message_begin(self) -> None:
        # The parent's scope is for ASGI only: made when it is known that this goes there.
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_in_message = True

    def on_headers_complete(self) -> None:
        self._check_head_bytes()
        self._is_in_head = False
        path = self.url.partition(b"?")[0]
        if path in self._router.hot_paths and self.parser.get_method() == b"POST":
            self._begin_hot(path)
            return
        self._incoming = None
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)  # The scope holds this very list.
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._incoming is None:
            super().on_body(body)
            return
        max_body_bytes = self._router.max_body_bytes(self._incoming.path)
        if self._incoming.refusal is None and not self._incoming.add_body(body, max_body_bytes):
            self._refuse(self._incoming, body_too_large(max_body_bytes))

    def on_message_complete(self) -> None:
        self._is_in_message = False
        self._is_in_head = True
        self._num_head_bytes = 0
        if self._is_ending:
            self.transport.close()
            return
        cycle, self._incoming = self._incoming, None
        if cycle is None:
            super().on_message_complete()
            return
        cycle.is_whole = True
        if cycle is self._active:
            cycle.on_whole(cycle)

    # What a hot cycle asks for.

    def write(self, data: bytes) -> None:
        self.transport.write(data)
        # A connection may be full already when an answer begins: the loop does not say it twice.
        if self.flow.write_paused and self._active is not None and self._active.owner is not None:
            self._active.owner.pause()

    def answered(self) -> None:
        self._active = None
        self.on_response_complete()

    def close(self) -> None:
        """Closed once all is sent; a client that does not take it in time is cut off.

        While a refused request still arrives it is read and dropped: closing at once would reset the
        connection, and the client might never see why.
        """
        self._is_ending = True
        if not self._is_in_message:
            self.transport.close()
        self.loop.call_later(self._router.settings.client_linger_s, self.transport.abort)

    # What the parent would do otherwise.

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # Any: the parent's types know nothing of our own kind of cycle.
        if not isinstance(cycle, HotCycle):
            super()._start_asgi_task(cycle, app)
            return
        # Not at once: answering a row of pipelined requests would nest as deep as the row is long.
        self._active = cycle
        self.loop.call_soon(self._start_hot, cycle)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # It has not even taken its last answer.
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """The client's bytes make no sense: one error if no answer is on its way, and the end of the connection."""
        error = self._refusal or bad_request(msg, "invalid_http")
        if self._has_open_answer():
            self.transport.close()
            return
        self._is_in_message = False  # There is no telling where the rest of it would end.
        cycle = HotCycle(self, b"", [], lambda _: None)
        cycle.keep_alive = False
        cycle.answer_error(error)

    def _begin_hot(self, path: bytes) -> None:
        cycle = HotCycle(self, path, self.headers, self._router.dispatch)
        cycle.takes_chunks = self.parser.get_http_version() != "1.0"
        cycle.keep_alive = cycle.takes_chunks and self.parser.should_keep_alive()
        previous: RequestResponseCycle | None = self.cycle
        self.cycle = cycle  # type: ignore[assignment]  # has all that the parent asks of a cycle
        self._incoming = cycle
        if previous is None or previous.response_complete:
            self._active = cycle
            self._greet(cycle)
        else:
            self._queue(cycle)

    def _queue(self, cycle: HotCycle) -> None:
        self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]  # _start_asgi_task takes both kinds
        if len(self.pipeline) >= MAX_PIPELINED:
            self.flow.pause_reading()

    def _start_hot(self, cycle: HotCycle) -> None:
        if cycle is not self._active or cycle.response_complete:
            return
        if cycle.is_whole and cycle.refusal is None:
            cycle.on_whole(cycle)
        else:
            self._greet(cycle)

    def _greet(self, cycle: HotCycle) -> None:
        """Refuse at once what is surely too large, or ask for the body of who waits to be asked."""
        max_body_bytes = self._router.max_body_bytes(cycle.path)
        if cycle.refusal is not None or _content_length(cycle.headers) > max_body_bytes:
            self._refuse(cycle, cycle.refusal or body_too_large(max_body_bytes))
        elif _expects_continue(cycle.headers):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse(self, cycle: HotCycle, error: ApiError) -> None:
        """The rest of the body is not wanted: answered now or at its turn, and the connection ends."""
        cycle.refusal = error
        cycle.keep_alive = False
        if cycle is self._active and not cycle.response_complete:
            cycle.answer_error(error)

    def _check_head_bytes(self) -> None:
        limit = self._router.settings.max_header_bytes
        if self._num_head_bytes <= limit:
            return
        # The last read may have brought body as well: count exactly.
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > limit:
            self._refusal = headers_too_large(limit)
            raise ValueError("headers too large")

    def _has_open_answer(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return self._active is not None or bool(self.pipeline) or (cycle is not None and not cycle.response_complete)

    # A request that has begun must arrive whole in time.

    def _watch_the_reading(self) -> None:
        is_partial = self._is_in_message or self._num_head_bytes > 0
        if not is_partial:
            self._stop_read_timer()
        elif self._read_timer is None:
            self._start_read_timer()

    def _start_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self._router.settings.client_read_timeout_s, self._read_too_slow)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _read_too_slow(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        self._is_in_message = False  # What is still missing is not waited for.
        if self._incoming is not None and self._incoming is self._active and not self._incoming.response_complete:
            self._refuse(self._incoming, client_too_slow(self._router.settings.client_read_timeout_s))
        else:
            self.transport.close()


def _content_length(headers: list[tuple[bytes, bytes]]) -> int:
    """The length that the client declared, already checked by the parser; 0 where it declared none."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def _expects_continue(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
