"""One request of a gateway, in the place of a client's connection and of the connections to decode.

    gateway --messages--> Consultation --Heard--> PickerStream --> HotCycle --> Router, Gate, Exchange   as any request
    gateway <--replies--- Consultation <--------- PickerStream <-- HotCycle <-- Relay                      the answer
                                                        ^--post--- DecodeLeg                    the request for decode

The cycle writes its answer as it would to a socket, without framing: ``write`` takes it for a head, and bytes behind.
Decides nothing that ``core/requests/consultation.py`` can decide. ``server.py`` moves the messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from pdcluster_router.core.apis.client_apis import REQUEST_PATHS
from pdcluster_router.core.apis.openai_errors import (
    NO_DECODE,
    ApiError,
    RefusedRequest,
    bad_gateway_mode,
    body_too_large,
    client_too_slow,
    deadline_passed,
    draining,
    no_engine,
    too_many_connections,
)
from pdcluster_router.core.apis.request_head import Headers, read_head
from pdcluster_router.core.apis.rewrite import Parts
from pdcluster_router.core.requests.consultation import (
    Consultation,
    ErrorReply,
    GatewayBody,
    GatewayHead,
    GatewayMessage,
    GatewayReply,
    GatewaySide,
    Heard,
    Replies,
)
from pdcluster_router.core.requests.gateway_headers import NO_CHANGES, changes_between, endpoint_of, headers_in
from pdcluster_router.front.picker import heads
from pdcluster_router.front.picker.replies import ReplyQueue
from pdcluster_router.front.router import NOT_FORWARDED, Router
from pdcluster_router.front.server_protocol import MIN_UPLOAD_BYTES_PER_S
from pdcluster_router.http.connection import ResponseHead, ResponseSink
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.http.gateway import GatewayCall
from pdcluster_router.requests.gateway import Barred, may_be_whole
from pdcluster_router.telemetry.failures import Failure, FailureKind

logger = logging.getLogger(__name__)


class PickerStream:
    """One request. Event loop only. ``ended`` gives all back; call it once the stream is over, however it ended."""

    def __init__(self, router: Router, peer: tuple[str, int] | None) -> None:
        """``peer``: the address of the gateway; None: unknown."""
        self.endpoints: frozenset[str] | None = None
        self.may_read = asyncio.Event()
        """Set while the gateway is to be read."""
        self.may_read.set()
        self._router = router
        self._loop = asyncio.get_running_loop()
        _, self._new_cycle = router.paths_and_cycles(peer, is_internal=False)
        self._talk = Consultation()
        self._replies = ReplyQueue()
        self._is_ended = False
        self._cycle: HotCycle | None = None
        self._call: GatewayCall | None = None
        self._request_headers: Headers = []
        self._answer_headers: Headers = []
        self._unread_stream: ResponseHead | None = None
        """The head of a stream that goes by unread; None: there is no such stream."""
        self._is_answering = False
        self._was_closing = self._is_framed = self._is_cut = False
        self._wanted_body_bytes = 0.0
        self._is_paused = False
        self._num_passed_bytes = self._num_asking = 0
        self.is_broken_off = False  # If so, the gateway may not take the end for a good one.
        self._timer = self._start_read_timer()
        self._is_guest = not router.clients.opened(self)  # Last: this may call ``abort``.

    # What the server asks.

    def hear(self, message: GatewayMessage) -> None:
        """Takes what the gateway says. Raises: ProtocolError: No gateway says this now."""
        heard, replies = self._talk.hear(message)
        self._send(replies)
        self._count_passed(message)
        for fact in heard:
            if not self._talk.is_over:
                _ACT[fact](self, message)

    def _count_passed(self, message: GatewayMessage) -> None:
        """A request that goes by may be as large as any other."""
        if self._talk.is_passing and isinstance(message, GatewayBody) and message.side is GatewaySide.REQUEST:
            self._num_passed_bytes += len(message.body)
            if self._num_passed_bytes > (most := self._router.settings.max_body_bytes):
                self.fail(body_too_large(most))

    async def next_reply(self) -> GatewayReply | None:
        """The reply that the gateway gets next; None: the stream is over. May wait; the request's own deadlines
        bound it."""
        reply = await self._replies.take()
        if self._is_paused and not self._replies.is_full:
            self._is_paused = False
            self.may_read.set()
            if self._cycle is not None and self._cycle.owner is not None:
                self._cycle.owner.resume()
        return reply

    def fail(self, error: ApiError) -> None:
        """The client gets ``error`` if it has nothing yet; else it is cut off."""
        logger.warning("gateway refused reason=%s", error.message)
        self._send(self._talk.refuse(ErrorReply(error.status, heads.JSON, error.body())))
        self.ended()

    def ended(self) -> None:
        """The stream is over: the request is, too, if it is not over already. Nothing is kept."""
        if self._is_ended:
            return
        self._is_ended = True
        self._timer.cancel()
        self._router.clients.closed(self)
        self._router.num_asking -= self._num_asking
        self.may_read.set()
        try:
            if self._talk.is_passing:
                self._end_unread()
        finally:
            cycle, self._cycle, self._call = self._cycle, None, None
            self._talk.close()
            self._replies.close()
            if cycle is not None:
                cycle.gone()

    def _end_unread(self) -> None:
        """An answer that went by unread is over. That it is whole is likely, and all that the router can know."""
        sink, cycle, head = self._sink, self._cycle, self._unread_stream
        if sink is None or cycle is None or not may_be_whole(cycle.owner):
            return
        if head is not None:
            sink.on_head(head)
            sink.on_body(heads.UNREAD)
        sink.on_end()

    def abort(self) -> None:
        """Ends the stream: this guest makes room, or it has sent nothing in time."""
        self.is_broken_off = True
        self.ended()

    # What the gateway has said.

    def _hear_head(self, message: GatewayMessage) -> None:
        assert isinstance(message, GatewayHead)
        self.endpoints = message.endpoints
        path, method, headers = heads.head_in(message)
        self._request_headers = headers
        try:
            self._check(headers, path, method)
            if path in REQUEST_PATHS:
                self._begin(path, headers)
            else:
                heads.check_passed(path, method)
                self._pass_by(headers)
        except RefusedRequest as refused:
            self._router.refused_cycle(self._new_cycle, self, path, headers).answer_error(refused.error)

    def _check(self, headers: Headers, path: bytes, method: bytes) -> None:
        """Raises: RefusedRequest: There are too many requests, the head is too large, or its method is another one."""
        clients, settings = self._router.clients, self._router.settings
        if self._is_guest and not clients.may_stay(self):
            error = too_many_connections(clients.max_connections)
            self._router.services.failures.tell(Failure(FailureKind.TOO_MANY_CONNECTIONS, reason=error.message))
            raise RefusedRequest(error)
        heads.check_head(headers, path, method, settings.max_header_bytes)

    def _begin(self, path: bytes, headers: Headers) -> None:
        """Raises: RefusedRequest: The head cannot be a request's, or the gateway is set up in another way."""
        head = read_head("1.1", headers)
        if problem := self._talk.problem:
            raise RefusedRequest(bad_gateway_mode(problem))
        cycle = self._cycle = self._new_cycle(self, path, head, self._router.dispatch, self._router.room)
        cycle.gateway, cycle.takes_chunks, cycle.begun_at = self, False, self._router.services.now()
        if error := self._router.admit(cycle) or cycle.add_head(heads.num_head_bytes(headers)):
            self._turn_down(cycle, error)
            return
        cycle.request_id = cycle.request_id or os.urandom(16).hex().encode()
        self._send(self._talk.ask_for_body())

    def _turn_down(self, cycle: HotCycle, error: ApiError) -> None:
        cycle.answer_error(self._router.no_room() if error.code == "no_room" else error)

    def _pass_by(self, headers: Headers) -> None:
        """Any decode engine gets the request as it is. Raises: RefusedRequest: The key is wrong, or no engine there."""
        access, roster = self._router.access, self._router.services.roster
        if self._router.is_draining:
            raise RefusedRequest(draining())
        admitted = access.admit(headers)
        if not isinstance(admitted, str):
            raise RefusedRequest(admitted)
        engine = roster.other_decode(Barred((), self.endpoints))
        if engine is None:
            raise RefusedRequest(no_engine("decode", NO_DECODE))
        wanted = [header for header in headers if header[0] not in NOT_FORWARDED]
        wanted += headers_in(access.line_for_engines(headers))
        self._send(self._talk.pass_by(endpoint_of(engine.url), changes_between(headers, wanted)))
        self._router.num_asking += 1
        self._num_asking = 1
        self._limit_passing()

    def _limit_passing(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(self._router.settings.whole_answer_timeout_s, self._passed_too_long)

    def _hear_part(self, message: GatewayMessage) -> None:
        assert isinstance(message, GatewayBody)
        cycle = self._cycle
        if cycle is None or cycle.response_complete:
            return
        if error := cycle.add_body(message.body, self._router.settings.max_body_bytes):
            self._turn_down(cycle, error)

    def _hear_whole(self, _: GatewayMessage) -> None:
        if self._cycle is not None and not self._cycle.response_complete:
            self._timer.cancel()
            self._cycle.hand_over()

    def _hear_withdrawn(self, _: GatewayMessage) -> None:
        """The gateway answers its client itself: as if the client had left."""
        self._limit_passing()
        if self._cycle is not None:
            self._cycle.gone()

    # What decode answers.

    def _hear_answer_head(self, message: GatewayMessage) -> None:
        assert isinstance(message, GatewayHead)
        head = heads.answer_head_in(message)
        self._answer_headers, status = head.headers, head.status
        if self._sink is None:
            return
        if self._talk.carries_answer:
            self._sink.on_head(head)
        elif status < 400 and heads.is_stream(head):  # Its head says nothing of its success.
            self._send(self._talk.begin_answer(NO_CHANGES))
            self._unread_stream = ResponseHead(status, self._answer_headers, len(heads.UNREAD), heads.JSON_TYPE)
        else:
            self._hear_unread(status)

    def _hear_unread(self, status: int) -> None:
        """An answer goes by whose body the router does not see."""
        assert self._sink is not None
        body = heads.UNREAD_ERROR if status >= 400 else heads.UNREAD
        self._sink.on_head(ResponseHead(status, self._answer_headers, len(body), heads.JSON_TYPE))
        self._sink.on_body(body)
        if status >= 400 and self._sink is not None:
            self._sink.on_end()

    def _hear_answer_part(self, message: GatewayMessage) -> None:
        assert isinstance(message, GatewayBody)
        if self._sink is not None:
            self._sink.on_body(message.body)

    def _hear_answer_end(self, _: GatewayMessage) -> None:
        if self._sink is not None and self._talk.carries_answer:
            call, self._call = self._call, None
            assert call is not None
            call.is_closed = True
            call.sink.on_end()

    @property
    def _sink(self) -> ResponseSink | None:
        """The receiver of the answer; None: there is none any more."""
        return self._call.sink if self._call is not None and not self._call.is_closed else None

    # What the decode leg asks (Gateway).

    @property
    def carries_answer(self) -> bool:
        return self._talk.carries_answer

    def post(self, url: str, headers: bytes, body: Parts, sink: ResponseSink) -> GatewayCall:
        self._call = GatewayCall(sink, self._allow_reading)
        changes = changes_between(self._request_headers, headers_in(headers))
        self._request_headers = []
        self._send(self._talk.deliver(endpoint_of(url), changes, body))
        return self._call

    def _allow_reading(self, may: bool) -> None:
        if may:
            self.may_read.set()
        else:
            self.may_read.clear()

    # What the cycle asks (ClientConnection).

    @property
    def is_full(self) -> bool:
        """Whether no comment may be written now."""
        return not self._talk.may_add or self._replies.is_full

    def write(self, data: bytes) -> None:
        if self._is_ended:
            return
        if self._is_answering:
            self._send(self._talk.write(data))
        else:
            self._is_answering = True
            head, _, body = data.partition(b"\r\n\r\n")
            line, _, lines = head.partition(b"\r\n")
            self._start(int(line.split(b" ", 2)[1]), headers_in(lines), body)

    def answered(self) -> None:
        if self._is_ended or self._talk.is_over:
            return
        if self._is_cut:
            self._send(self._talk.refuse(heads.CUT))
        else:
            self._send(self._talk.end())

    def close(self, *, with_reset: bool = False) -> None:
        self._is_cut = with_reset or (self._is_framed and not self._was_closing)

    def _start(self, status: int, headers: Headers, body: bytes) -> None:
        """Takes an answer's head, and its first bytes. An error is whole."""
        self._was_closing = self._cycle is not None and not self._cycle.keep_alive
        self._is_framed = any(name == b"content-length" for name, _ in headers)
        is_unread_error = body == heads.UNREAD_ERROR and not self._talk.carries_answer
        if status >= 400 and not is_unread_error:
            kept = list(changes_between([], headers).set)
            self._send(self._talk.refuse(ErrorReply(status, kept, body)))
        elif self._talk.is_held:
            changes = NO_CHANGES if is_unread_error else changes_between(self._answer_headers, headers)
            self._send(self._talk.begin_answer(changes))
            self._send(self._talk.write(body))

    # A request that has begun must come whole in time.

    def _start_read_timer(self) -> asyncio.TimerHandle:
        seconds = self._router.settings.client_read_timeout_s
        had = self._cycle.num_body_bytes if self._cycle is not None else 0
        self._wanted_body_bytes = had + seconds * MIN_UPLOAD_BYTES_PER_S
        return self._loop.call_later(seconds, self._read_too_slow)

    def _read_too_slow(self) -> None:
        cycle = self._cycle
        if cycle is None:
            self.abort()
        elif cycle.num_body_bytes >= self._wanted_body_bytes:
            self._timer = self._start_read_timer()  # A large body that comes fast enough.
        elif not cycle.response_complete:
            cycle.answer_error(client_too_slow(self._router.settings.client_read_timeout_s))

    def _passed_too_long(self) -> None:
        seconds = self._router.settings.whole_answer_timeout_s
        self.fail(deadline_passed(seconds, "waiting for the decode engine"))

    def _send(self, replies: Replies) -> None:
        self._replies.add(replies)
        if self._replies.is_full and not self._is_paused:
            self._pause()
        if self._talk.is_over:
            self._replies.close()

    def _pause(self) -> None:
        """The gateway takes less than comes: no more is read of an answer, or of what goes by unread. A request that
        the router reads is read on, for its bytes are bounded."""
        owner = self._cycle.owner if self._cycle is not None else None
        self._is_paused = self._talk.is_passing or (owner is not None and self._is_answering)
        if self._is_paused and owner is not None:
            owner.pause()
        elif self._is_paused:
            self.may_read.clear()


_ACT: Final[dict[Heard, Callable[[PickerStream, GatewayMessage], None]]] = {
    Heard.HEAD: PickerStream._hear_head,
    Heard.PART: PickerStream._hear_part,
    Heard.WHOLE: PickerStream._hear_whole,
    Heard.WITHDRAWN: PickerStream._hear_withdrawn,
    Heard.ANSWER_HEAD: PickerStream._hear_answer_head,
    Heard.ANSWER_PART: PickerStream._hear_answer_part,
    Heard.ANSWER_END: PickerStream._hear_answer_end,
}
