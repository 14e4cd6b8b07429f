"""The client side of the router: uvicorn's HTTP protocol with a short way for the hot paths.

    bytes --> httptools --> hot path?  yes --> HotCycle --> Router.dispatch    (no ASGI, no task)
                                       no  --> uvicorn's own cycle --> FastAPI

A subclass of uvicorn 0.54's ``HttpToolsProtocol``: it keeps pipelining, keep-alive and shutdown; ``reading.py`` feeds
the parser. This file decides what is hot, bounds how much a client may send, and how long the client may take.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from pdcluster_router.core.apis.openai_errors import (
    ApiError,
    RefusedRequest,
    bad_request,
    body_too_large,
    client_too_slow,
    method_not_allowed,
    no_room,
    too_many_connections,
)
from pdcluster_router.core.apis.request_head import RequestHead, path_of, read_head
from pdcluster_router.core.clients.room import Heads, RoomLimit, Unread
from pdcluster_router.front.router import Router
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.http.reading import ReadingProtocol
from pdcluster_router.http.slots import ROUTER
from pdcluster_router.telemetry.failures import Failure, FailureKind

MAX_PIPELINED: Final = 8
"""Requests that may wait on one connection before we stop reading from it."""

MAX_BYTES_AHEAD: Final = 64 << 10
"""Bytes of bodies that are read while another request of the connection is not answered yet."""
MIN_UPLOAD_BYTES_PER_S: Final = 16 << 10
"""A body that arrives at least this fast is waited for: 128 kbit/s, a poor mobile link."""

ROUTER_STATE: Final = "router"
"""Key of the router in the state that the application's lifespan yields."""
_PROBE_PATH: Final = b"/health"


class RouterProtocol(ReadingProtocol):
    """One client connection. Event loop only."""

    __slots__ = ROUTER

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._router: Router = app_state[ROUTER_STATE]
        leavers, max_header_bytes = self._router.leavers, self._router.settings.max_header_bytes
        super().__init__(config, server_state, app_state, leavers, max_header_bytes, _loop)
        self._active: HotCycle | None = None  # The cycle whose turn it is to be answered, if it is a hot one.
        self._incoming: HotCycle | None = None  # The cycle whose body is being read, if it is a hot one.
        self._read_timer: asyncio.TimerHandle | None = None
        self._num_bytes_ahead = 0
        self._is_held = False  # Nothing is read until the next answer is over: the client sends too far ahead.
        self._is_ending = False
        self._is_clogged = False  # The next answer waits until the client has taken some of the earlier ones.
        self._take_timer: asyncio.TimerHandle | None = None

    # What the event loop says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the parent
        super().connection_made(transport)
        self._is_internal = self._router.is_internal(transport.get_extra_info("sockname")[1])
        self._hot_paths, self._new_cycle = self._router.paths_and_cycles(self.client, is_internal=self._is_internal)
        self._max_body_bytes = self._router.max_body_bytes(is_internal=self._is_internal)
        self._count = self._router.callers if self._is_internal else self._router.clients
        self._is_guest = not self._count.opened(self, self.client[0] if self.client else "")
        share = RoomLimit.ENGINES if self._is_internal else RoomLimit.CLIENTS
        self._room = self._router.callers.room_of(self) if self._is_internal else self._router.room
        self._heads, self.unread = Heads(self._room, share), Unread(self._room, share)
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._limit_taking(is_awaited=False)
        self._count.closed(self)
        self._heads.close()
        active, incoming, self._active, self._incoming = self._active, self._incoming, None, None
        super().connection_lost(exc)
        waiting: list[Any] = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]  # as before the first request; breaks a reference cycle
        for cycle in (active, incoming, *waiting):
            if isinstance(cycle, HotCycle):
                cycle.gone()

    @property
    def is_in_use(self) -> bool:
        """Whether an accepted call, or a whole request for a page, waits here for its answer."""
        page: object = self.cycle
        if self._active is not None or not isinstance(page, RequestResponseCycle):
            return self._active is not None and self._active.owner is not None
        return not (page.more_body or page.response_started or self.is_full)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._active is not None and self._active.owner is not None:
            self._active.owner.pause()
        else:
            self._limit_taking(is_awaited=True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit_taking(is_awaited=False)
        if self._is_clogged:
            self._is_clogged = False
            self.on_response_complete()
        elif self._active is not None and self._active.owner is not None:
            self._active.owner.resume()

    # What was read, in the course of data_received.

    def head_is_whole(self) -> None:
        if self._heads.num_half_bytes:
            self._heads.is_whole()
        method, version = self.parser.get_method(), self.parser.get_http_version()
        path = self.url if self.url in self._hot_paths else path_of(self.url)
        if method == b"CONNECT":
            raise RefusedRequest(method_not_allowed("CONNECT", "this router"))
        if version not in ("1.1", "1.0"):
            raise RefusedRequest(bad_request(f"HTTP/{version} is not served here", "invalid_http"))
        head = read_head(version, self.headers)
        is_limited = self._is_guest and self._is_over_the_limit(path)
        if method == b"POST" and path in self._hot_paths:
            self._begin_hot(path, head, version)
        else:
            self._begin_cold(head)
        if is_limited or self._router.is_leaving:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self.num_silent_bytes = 0
        cycle = self._incoming
        if cycle is None:
            self.cold_body(body)
            return
        if cycle.refusal is None and (refusal := cycle.add_body(body, self._max_body_bytes)):
            self._refuse(cycle, self._count_no_room(refusal))
        if cycle is not self._active and not self._is_ending:
            self._num_bytes_ahead += len(body)
            if self._num_bytes_ahead > MAX_BYTES_AHEAD:
                self._hold()

    def message_is_whole(self) -> None:
        if self._read_timer is not None:
            self._stop_read_timer()
        if self._is_ending:
            self.transport.close()
            return
        cycle, self._incoming = self._incoming, None
        if cycle is None:
            self.cold_message_complete()
        elif cycle is self._active and cycle.refusal is None:
            cycle.hand_over()
        else:  # ``_start_hot`` goes on at its turn.
            cycle.whole_at = self.now()

    def num_body_bytes_left(self) -> int:
        return self._incoming.head.content_length - self._incoming.num_body_bytes if self._incoming is not None else 0

    def has_read(self) -> None:
        if not (self.is_in_message or self.num_silent_bytes):
            if self._read_timer is not None:
                self._stop_read_timer()
            return
        if self.is_in_message and self.is_in_head and not self._heads.hold_half(self.num_head_bytes()):
            self.refuse(self.no_room())
        if not self.is_in_message and self._has_open_answer():
            self._stop_read_timer()
        elif self._read_timer is None and not self._is_held:
            self._start_read_timer()

    # What a hot cycle asks for.

    def write(self, data: bytes) -> None:
        self.transport.write(data)
        # A connection may be full when an answer begins: the loop calls ``pause_writing`` only once.
        if self.flow.write_paused and self._active is not None and self._active.owner is not None:
            self._active.owner.pause()

    def answered(self) -> None:
        self._active = None
        if not self._is_ending:  # Else the client would take the next answer for the rest of the broken one.
            self.on_response_complete()
        elif not self.transport.is_closing():
            self.flow.resume_reading()  # More bytes are dropped: see ``close``.

    def close(self, *, with_reset: bool = False) -> None:
        """Closes the connection once all is sent; a client that does not take the bytes in time is cut off.

        The rest of a refused request is read and dropped: to close at once would reset the connection, and the client
        might never read the error.
        """
        self._is_ending = True
        if with_reset:
            self.end_with_reset()
        if self.is_deaf and not with_reset:
            self.transport.write_eof()
        elif not self.is_in_message or with_reset:
            self.transport.close()
        self.linger(self._router.settings.client_linger_s)

    # What the parent would do otherwise.

    def on_response_complete(self) -> None:
        self._num_bytes_ahead = 0
        if self.flow.write_paused and not self.transport.is_closing():
            self._is_clogged = True
            self._limit_taking(is_awaited=True)
            self._hold()
            return
        self._is_held = False
        self.go_on_or_pause()
        if self.cycle is not None and self.cycle.response_complete:
            self.cycle = self.scope = None  # type: ignore[assignment]  # an idle connection keeps no head
        if self.pipeline and len(self.pipeline) >= MAX_PIPELINED:
            self._hold()
        elif self.is_in_message and self._read_timer is None and not self.transport.is_closing():
            self._start_read_timer()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # Any: the parent's types know nothing of our own kind of cycle.
        if self._is_clogged:
            self.pipeline.appendleft((cycle, app))
        elif not isinstance(cycle, HotCycle):
            super()._start_asgi_task(cycle, app)
        else:  # Not at once: each of a row of pipelined requests would be answered one call deeper than the last.
            self._active = cycle
            self.loop.call_soon(self._start_hot, cycle)

    def refuse_the_rest(self, error: ApiError) -> None:
        """The client gets one error, after the answers that are on their way. Then the connection ends."""
        self._stop_read_timer()
        incoming = self._incoming
        if self.transport.is_closing():
            return
        if self._is_ending:
            self.transport.write_eof()
        elif incoming is None and self.cycle is None and not self.is_in_head:
            self.transport.close()  # A page has ended before its body, and the body cannot be read.
        else:
            is_for_page = incoming is None and self.drop_unread_page(error)
            new_cycle = HotCycle if is_for_page else self._new_cycle  # The page has its own log line.
            cycle = incoming or self._router.refused_cycle(new_cycle, self, self.url.partition(b"?")[0], self.headers)
            cycle.begun_at = self.begun_at if self.headers else cycle.begun_at  # Part of its head has come.
            is_next = is_for_page or (incoming is None and not self._has_open_answer())
            self._refuse_in_order(cycle, error, is_next=is_next or cycle is self._active)

    def _refuse_in_order(self, cycle: HotCycle, error: ApiError, *, is_next: bool) -> None:
        cycle.keep_alive = False
        if is_next:
            cycle.answer_error(error)
        elif cycle is not self._incoming:
            cycle.whole_at = self.now()  # No more of it is read.
            self._queue(cycle)
        cycle.refusal = cycle.refusal or error

    def _begin_hot(self, path: bytes, head: RequestHead, version: str) -> None:
        router = self._router
        cycle = self._new_cycle(self, path, head, router.dispatch, self._room)
        cycle.begun_at = self.begun_at
        cycle.refusal = (None if self._is_internal else router.admit(cycle)) or cycle.add_head(self.num_head_bytes())
        if cycle.refusal is not None:
            self._count_no_room(cycle.refusal)
        if not (self._is_internal or head.request_id):
            cycle.request_id = os.urandom(16).hex().encode()
        cycle.takes_chunks = version != "1.0"
        cycle.keep_alive = cycle.takes_chunks and self.parser.should_keep_alive()
        previous: RequestResponseCycle | None = self.cycle
        self.cycle = self._incoming = cycle  # type: ignore[assignment]  # has all that the parent asks of a cycle
        if previous is None or (previous.response_complete and not self._is_clogged):
            self._active = cycle
            if cycle.refusal is not None or head.expects_continue or head.content_length > self._max_body_bytes:
                self._answer_early(cycle)
        else:
            self._queue(cycle)

    def _begin_cold(self, head: RequestHead) -> None:
        self._incoming = None
        if not self._heads.take_page(num_bytes := self.num_head_bytes()):
            raise RefusedRequest(self.no_room())
        self.cold_head(head)
        self.cycle.on_response = partial(self._page_is_answered, num_bytes)

    def _page_is_answered(self, num_head_bytes: int) -> None:
        self._heads.page_is_over(num_head_bytes)
        self.on_response_complete()

    def _queue(self, cycle: HotCycle) -> None:
        self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]  # _start_asgi_task takes both kinds
        if len(self.pipeline) >= MAX_PIPELINED:
            self._hold()

    def _hold(self) -> None:
        """Reads nothing more until the next answer is over. The client has no read timeout meanwhile."""
        self._is_held = True
        self._stop_read_timer()
        self.flow.pause_reading()

    def _start_hot(self, cycle: HotCycle) -> None:
        if cycle is not self._active or cycle.response_complete:
            return
        if cycle is not self._incoming and cycle.refusal is None:
            cycle.hand_over()
        else:
            self._answer_early(cycle)

    def _answer_early(self, cycle: HotCycle) -> None:
        """Sends the error if the request is refused or surely too large; or 100 Continue if the client waits."""
        if cycle.refusal is not None or cycle.head.content_length > self._max_body_bytes:
            self._refuse(cycle, cycle.refusal or body_too_large(self._max_body_bytes))
        elif cycle.head.expects_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse(self, cycle: HotCycle, error: ApiError) -> None:
        """Refuses a request without the rest of its body: now or at its turn. Then the connection ends."""
        cycle.refusal = error
        cycle.keep_alive = False
        if cycle is self._active and not cycle.response_complete:
            cycle.answer_error(error)

    def _is_over_the_limit(self, path: bytes) -> bool:
        """Whether this connection is still a guest: then only a probe of our health is served, once.

        Raises:
            RefusedRequest: It is a guest, and ``path`` is no probe's.
        """
        self._is_guest = not self._router.clients.may_stay(self)
        if not self._is_guest or path == _PROBE_PATH:
            return self._is_guest
        error = too_many_connections(self._router.clients.max_connections)
        self._tell(FailureKind.TOO_MANY_CONNECTIONS, error)
        raise RefusedRequest(error)

    def no_room(self) -> ApiError:
        return self._count_no_room(no_room(self._router.room.max_bytes))

    def _count_no_room(self, error: ApiError) -> ApiError:
        """Returns ``error``. A lack of room is counted now, not when the client gets the error at its turn."""
        if error.code == "no_room":
            self._tell(FailureKind.NO_ROOM, error)
        return error

    def _tell(self, kind: FailureKind, error: ApiError) -> None:
        self._router.services.failures.tell(Failure(kind, reason=error.message))

    def _has_open_answer(self) -> bool:
        return self._active is not None or bool(self.pipeline) or self.cycle is not None

    # A request that has begun must arrive whole in time.

    def _start_read_timer(self) -> None:
        seconds = self._router.settings.client_read_timeout_s
        had = self._incoming.num_body_bytes if self._incoming is not None else 0
        self._wanted_body_bytes = had + seconds * MIN_UPLOAD_BYTES_PER_S
        self._read_timer = self.loop.call_later(seconds, self._read_too_slow)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _limit_taking(self, *, is_awaited: bool) -> None:
        """Starts or stops the time limit for a client that takes no bytes. A relayed answer's owner has its own."""
        if self._take_timer is not None:
            self._take_timer.cancel()
        seconds = self._router.settings.idle_timeout_s
        self._take_timer = self.loop.call_later(seconds, self.abort) if is_awaited else None

    def _read_too_slow(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        cycle = self._incoming
        if cycle is not None and cycle.refusal is None and cycle.num_body_bytes >= self._wanted_body_bytes:
            self._start_read_timer()  # A large body that comes fast enough.
            return
        self.stop_reading()  # The missing bytes are not waited for.
        if cycle is not None and cycle is self._active and not cycle.response_complete:
            self._refuse(cycle, client_too_slow(self._router.settings.client_read_timeout_s))
        else:
            self.transport.close()
