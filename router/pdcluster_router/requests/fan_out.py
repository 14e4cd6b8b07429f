"""Serves a client's request for several sequences in parts: each part is a request of its own to prefill and decode.

    client <--HotCycle-- FanOut <--PartCycle 0-- Exchange --> a prefill engine, a decode engine
                            ^------PartCycle 1-- Exchange --> likewise, with a reservation and attempts of its own

``core/apis/parts.py`` decides which requests are taken apart, ``core/apis/merge.py`` makes one answer. A part that
fails after all its tries fails the whole: the client gets that one error, and every other part is withdrawn. When the
client leaves, all parts are withdrawn. Each part waits at the gate by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from pdcluster_router.core.apis.client_apis import OPENAI, ClientApi
from pdcluster_router.core.apis.merge import BadAnswer, Naming, StreamMerge, merged
from pdcluster_router.core.apis.messages import MAX_ANSWER_BYTES
from pdcluster_router.core.apis.openai_errors import ENGINE_ERROR, ApiError, decode_lost
from pdcluster_router.core.apis.parts import Division, taken_apart
from pdcluster_router.core.apis.sse import MAX_FIRST_EVENT_BYTES, given_up_in
from pdcluster_router.core.clients.part_places import PartPlaces
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.requests.part import EngineError, OnePrefill, PartCycle, PartError
from pdcluster_router.requests.parts_record import PartsRecord
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services
from pdcluster_router.telemetry.failures import FailureKind

Enter = Callable[[HotCycle, ClientRequest], None]

_CHAT: Final = b"/v1/chat/completions"
_QUEUE_FULL: Final = FailureKind.QUEUE_FULL.value


def fan_out(services: Services, places: PartPlaces, enter: Enter, cycle: HotCycle, request: ClientRequest) -> bool:
    """Serves the request in parts, if possible. Returns whether it does. ``enter``: the gate's, for each part."""
    is_chat, num_header_bytes = request.path == _CHAT, len(request.headers)
    parts = taken_apart(request.body, is_chat=is_chat, num_header_bytes=num_header_bytes)
    if parts is None or not places.take(len(parts.bodies)):
        return False
    FanOut(services, places, enter, cycle, request, parts).start()
    return True


class FanOut:
    """One request in parts. Event loop only. The client's cycle is ours until its answer is over."""

    def __init__(
        self,
        services: Services,
        places: PartPlaces,
        enter: Enter,
        cycle: HotCycle,
        request: ClientRequest,
        parts: Division,
    ) -> None:
        """``places``: where the parts' places were taken, and are given back when the request has ended."""
        self._services = services
        self._places = places
        self._enter = enter
        self._cycle = cycle
        self._bodies = deque(parts.bodies)
        """The bodies of the parts that have not entered yet."""
        self._naming = naming = Naming(request.request_id, len(parts.bodies), parts.num_choices)
        self._parts = [
            PartCycle(self, number, request.path, naming.part_id(number), body.num_bytes)
            for number, body in enumerate(parts.bodies)
        ]
        self._record = PartsRecord(services, request, self._parts, parts.num_choices)
        self._terms = [OnePrefill(request.terms).terms for _ in range(len(parts.bodies) // parts.num_choices)]
        self._request = msgspec.structs.replace(request, body=request.body.forgotten(), api=_api_of(services))
        self._merge = StreamMerge(naming) if request.body.is_stream else None
        self._answers = [bytearray() for _ in parts.bodies]
        self._num_bytes = [0] * len(parts.bodies)
        """The bytes held of the answer to each part, whole or not. None has gone to the client."""
        self._num_entered = 0
        self._num_left = len(parts.bodies)
        self._to_send = set(range(len(parts.bodies)))
        """The parts whose bodies may be sent, or sent again."""
        self._lines = b""
        """The header lines of the answer: those of the part that began first."""
        self._held = b""
        """The beginning of a stream, held until engines accept all parts: so an error can have its own status."""
        self._has_displaced = False
        """A part has cost another key a place: with all parts withdrawn at no cost, it could do so again at once."""
        self._has_begun = False
        self._has_first_byte = False
        self._is_over = False
        self.num_streamed_bytes = 0
        """Bytes of the answer that have gone to the client."""

    def start(self) -> None:
        """The first part enters now, and one more in each turn of the loop."""
        self._cycle.owner = self._cycle.source = self
        self._cycle.teller = self._record
        self._services.divided.add(self._record)
        if self._cycle.slot is not None:
            self._cycle.slot.waits_for_a_place()
        self._enter_next()

    def _enter_next(self) -> None:
        if self._is_over:
            return
        number = self._num_entered
        self._num_entered += 1
        if self._num_entered < len(self._parts):
            self._services.call_later(0.0, self._enter_next)
        request = self._request_of(number)
        if self._num_entered == len(self._parts):
            self._request = self._request.without_body()
        self._enter(self._parts[number], request)

    def _request_of(self, number: int) -> ClientRequest:
        request_id = self._naming.part_id(number)
        return msgspec.structs.replace(
            self._request,
            request_id=request_id,
            headers=self._headers_for(request_id),
            body=self._bodies.popleft(),
            api=replace(self._request.api, held=partial(self._holds, self._parts[number])),
            terms=self._terms[number // self._naming.num_choices],
            has_transfer=True,
            trace=self._request.trace.part(number) if self._request.trace is not None else None,
            is_part=True,
            notes=[],
        )

    def _headers_for(self, request_id: str) -> bytes:
        """The client's header lines, with the part's id in place of the client's id."""
        line_of = self._services.dialect.client_line
        theirs = line_of(self._request.request_id.encode("ascii"))
        lines = [line for line in self._request.headers.splitlines(keepends=True) if line != theirs]
        return b"".join(lines) + line_of(request_id.encode("ascii"))

    # What the parts say (PartOwner).

    def part_begins(self, headers: bytes) -> None:
        self._lines = self._lines or headers

    def part_says(self, part: PartCycle, chunk: bytes) -> None:
        if self._is_over:
            return
        if not self._has_first_byte:
            self._has_first_byte = True
            self._record.first_byte()
        if self._merge is None:
            self._collect(part, chunk)
            return
        try:
            self._stream(self._merge.feed(part.number, chunk))
        except BadAnswer as error:
            self._unmergeable(part, str(error))

    def part_ends(self, part: PartCycle) -> None:
        if self._is_over:
            return
        self._num_left -= 1
        try:
            if self._merge is not None:
                self._end_stream(self._merge.end(part.number))
            elif not self._num_left:
                self._answer(merged(self._naming, self._answers))
        except BadAnswer as error:
            self._unmergeable(part, str(error))

    def part_fails(self, part: PartCycle, error: PartError) -> None:
        if self._is_over:
            return
        code = error.code if isinstance(error, ApiError) else ENGINE_ERROR
        self._record.part_failed(part, None if self._cycle.has_started else error.status, code)
        if code == _QUEUE_FULL and self._cycle.slot is not None and not self._has_cost_others:
            self._cycle.slot.give_back(self._services.now())
        self._fail(error)

    def part_displaces(self) -> None:
        self._has_displaced = True

    def part_is_sent(self, part: PartCycle) -> None:
        self._to_send.discard(part.number)
        if not self._to_send and not self._is_over:
            self._cycle.forget()

    # What the client's connection says (CycleOwner).

    def client_gone(self) -> None:
        num_parts = len(self._parts)
        self._record.client_gone(f"{num_parts - self._num_left} of {num_parts} parts were answered")
        self._end()

    def pause(self) -> None:
        for part in self._begun():
            if part.owner is not None:
                part.owner.pause()

    def resume(self) -> None:
        for part in self._begun():
            if part.owner is not None:
                part.owner.resume()

    @property
    def _has_cost_others(self) -> bool:
        return self._has_displaced or self._record.has_entered

    def _begun(self) -> list[PartCycle]:
        return [part for part in self._parts if part.has_started]

    # What the client's stream asks (StreamSource).

    @property
    def may_comment(self) -> bool:
        return self._merge is not None

    @property
    def stream_lines(self) -> bytes:
        return self._lines

    # The answer.

    def _collect(self, part: PartCycle, chunk: bytes) -> None:
        answer = self._answers[part.number]
        answer += chunk
        self._holds(part, len(answer))

    def _holds(self, part: PartCycle, num_bytes: int) -> None:
        """``num_bytes`` of the answer to ``part`` are held. All parts' answers grow together, so they share a limit."""
        self._num_bytes[part.number] = num_bytes
        if sum(self._num_bytes) > MAX_ANSWER_BYTES and not self._is_over:
            self._unmergeable(part, f"the answers to all parts are longer than {MAX_ANSWER_BYTES} bytes")

    def _stream(self, events: bytes) -> None:
        if self._has_begun:
            if events:
                self._write(events)
            return
        self._held += events
        is_taken = all(part.is_taken for part in self._parts)
        if self._held and (is_taken or len(self._held) > MAX_FIRST_EVENT_BYTES):
            self._begin()

    def _end_stream(self, events: bytes) -> None:
        self._stream(events)
        if self._num_left:
            return
        self._record.answered(_OK, events)
        self._end()
        self._cycle.end()

    def _begin(self) -> None:
        held, self._held = self._held, b""
        self._has_begun = True
        self._record.began()
        self.num_streamed_bytes = len(held)
        self._cycle.start(_OK, self._lines, None, held)

    def _write(self, events: bytes) -> None:
        self.num_streamed_bytes += len(events)
        self._cycle.write(events)

    def _answer(self, body: bytes) -> None:
        self._record.began()
        self._record.answered(_OK, body)
        self._end()
        self._cycle.answer(_OK, body, self._lines)

    def _unmergeable(self, part: PartCycle, reason: str) -> None:
        told = part.teller.told() if part.teller is not None else None
        error = decode_lost(told.decode_engine if told is not None else "decode", reason)
        self._record.unmergeable(part, None if self._cycle.has_started else error.status, error.code, reason)
        self._fail(error)

    def _fail(self, error: PartError) -> None:
        """The client gets this error, and nothing of the request is left."""
        self._end()
        if isinstance(error, EngineError):
            self._refuse(error)
        elif self._has_begun:
            self._cycle.cut(OPENAI.error_event(error))
        else:
            self._cycle.answer_error(error)

    def _refuse(self, error: EngineError) -> None:
        if self._has_begun:
            self._cycle.cut(OPENAI.refusal_event(error.body))
        else:
            self._cycle.refuse(error.status, error.body, error.headers)

    def _end(self) -> None:
        """Withdraws the parts that run. The record is written in the next turn, when each part has an outcome."""
        self._is_over = True
        for part in self._parts[: self._num_entered]:
            if not part.response_complete:
                part.withdraw()
        self._services.call_later(0.0, self._tell)

    def _tell(self) -> None:
        self._services.divided.discard(self._record)
        self._record.write()
        self._places.give_back(len(self._parts))
        self._parts.clear()  # The parts refer to us.


def _api_of(services: Services) -> ClientApi:
    """OpenAI's API, with plain answers held until they are whole: until then a part can be tried again."""
    return replace(OPENAI, unfinished=partial(given_up_in, marks=services.dialect.given_up))


_OK: Final = 200
