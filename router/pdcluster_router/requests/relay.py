"""Relays decode's response to the client: passes bytes on unchanged, and never lets an error look like success.

    HOLDING --first event or body byte--> RELAYING --end--> OVER
       |                                     |
       +--error before it--> one HTTP error  +--lost--> an SSE error event, then a cut

vLLM sends ``200`` and headers before it knows that the request works. So the relay holds back status and headers. Of a
stream it waits for the first event, which may be an error. Of a plain answer it waits for the first bytes, and for all
of a short one: if this engine dies, another one can still answer. Errors are collected whole, and so are plain answers
of any length, if their API shows only at the end whether they are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Protocol

from pdcluster_router.core.apis.client_apis import ClientApi
from pdcluster_router.core.apis.messages import MAX_ANSWER_BYTES
from pdcluster_router.core.apis.openai_errors import ENGINE_ERROR, ApiError, answer_head_too_large, from_engine
from pdcluster_router.core.apis.responses import UNPROVEN
from pdcluster_router.core.apis.rewrite import Bytes
from pdcluster_router.core.apis.sse import MAX_FIRST_EVENT_BYTES, UNBUFFERED, ErrorWatch, error_of, first_mark
from pdcluster_router.core.requests.vllm_ascend import RECOMPUTED
from pdcluster_router.http.connection import MAX_HEADER_BYTES, Call, ResponseHead, ResponseLost
from pdcluster_router.http.cycle import JSON, HotCycle
from pdcluster_router.telemetry.stream_gaps import StreamGaps

MAX_ERROR_BYTES: Final = 1 << 20
"""An error answer longer than this is cut off: it is no message for people."""
MOST_AWAITED_BYTES: Final = 256 << 10
"""A plain answer of at most this length is sent when all of it has come. asyncio reads as much at once."""

_OURS: Final = frozenset(
    b"connection content-length keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade "
    b"x-request-id".split()
)
"""Headers about one connection, not about the answer (RFC 9110, 7.6.1), and the request id, which the router adds."""


@dataclass(frozen=True, slots=True)
class DecodeRefusal:
    """Decode's error answer, in the shape of the client's API, ready to be passed on. ``headers``: whole lines."""

    status: int
    body: bytes
    headers: bytes
    code: str = ENGINE_ERROR
    """Another one: the router's own, for an answer that it does not take. Each engine would give the same."""

    @property
    def is_final(self) -> bool:
        return self.code != ENGINE_ERROR


class RelayOwner(Protocol):
    """The owner of a relay. One of ``answered``, ``refused`` and ``decode_lost`` is called, once.

    None of them is called after ``stop`` or ``fail``. ``Exchange`` is the only implementation.
    """

    def first_byte(self) -> None:
        """Decode's first body byte has come."""
        ...

    def begins(self) -> StreamGaps | None:
        """The client now gets the first bytes: from here on there is no other answer. Returns what a stream tells of
        each further piece; None: nothing."""
        ...

    def answered(self, status: int, end: Bytes) -> None:
        """The client has decode's whole answer. ``end``: its last bytes."""
        ...

    def refused(self, refusal: DecodeRefusal) -> None:
        """Decode answered an error. The client knows nothing yet."""
        ...

    def decode_lost(self, lost: ResponseLost) -> None:
        """Decode's answer did not come, or not to its end. The client has not been told yet."""
        ...


class _State(Enum):
    HOLDING = auto()
    RELAYING = auto()
    OVER = auto()


_HOLDING, _RELAYING, _OVER = _State
"""Module constants: Python 3.11 takes ten times as long to find a member in its Enum."""


class Relay:
    """The answer of one decode engine to one client. Event loop only; owned by its exchange."""

    __slots__ = (
        "_api",
        "_call",
        "_cycle",
        "_end",
        "_gaps",
        "_head",
        "_held",
        "_is_event_stream",
        "_marks",
        "_num_looked_at",
        "_num_seen_bytes",
        "_owner",
        "_state",
        "_watch",
        "is_paused",
        "num_bytes",
        "quiet_since",
    )

    def __init__(
        self, owner: RelayOwner, cycle: HotCycle, api: ClientApi, given_up: Mapping[bytes, str], *, now: float
    ) -> None:
        """``given_up``: bytes by which an unfinished answer is known, unless ``api`` has its own marks.
        ``now``: monotonic seconds.
        """
        self._owner = owner
        self._api = api
        self._marks = given_up if api.marks is None else api.marks
        self._cycle = cycle
        self._call: Call | None = None
        self._head: ResponseHead | None = None
        self._is_event_stream = False
        self._held: Bytes = b""
        self._end: Bytes = b""
        """The last bytes of an answer that has begun for the client; all of one that began when it was whole."""
        self.num_bytes = 0
        """Body bytes that decode has sent."""
        self.is_paused = False
        """Whether the client is slower than decode: no byte comes because none is read."""
        self._num_looked_at = 0  # Held bytes in which a first event was looked for.
        self._num_seen_bytes = 0
        self.quiet_since = now
        """When ``has_moved`` last found new bytes, or a client that was too slow for more; monotonic seconds."""
        self._state = _HOLDING
        self._watch: ErrorWatch | None = None
        self._gaps: StreamGaps | None = None
        cycle.source = self

    def begin(self, call: Call) -> None:
        """Bytes that come from ``call`` go to the client."""
        self._call = call

    def fail(self, error: ApiError) -> None:
        """Tells the client ``error``: as the answer; if that has begun, by a cut, in a stream after an error event."""
        if self._state is _OVER or self._cycle.response_complete:
            return
        is_stream = self._state is _RELAYING and self._is_event_stream
        has_begun = self._state is _RELAYING
        self._state = _OVER
        if not has_begun:
            self._cycle.answer_error(error)
        else:
            self._cycle.cut(self._last_event(error) if is_stream else b"", error)

    def refuse(self, refusal: DecodeRefusal) -> None:
        """The client gets decode's own error."""
        self._state = _OVER
        if not self._cycle.response_complete:
            self._cycle.refuse(refusal.status, refusal.body, refusal.headers)

    def has_moved(self, *, now: float) -> bool:
        """Whether bytes have come since the last call."""
        has_moved = self.num_bytes != self._num_seen_bytes
        self._num_seen_bytes = self.num_bytes
        if has_moved or self.is_paused:
            self.quiet_since = now
        return has_moved

    def lose(self, reason: str) -> None:
        """Gives decode's answer up, unless it is over."""
        if self._state is not _OVER:
            self._lose(ResponseLost(reason))

    def stop(self) -> None:
        """There is no client any more."""
        self._state = _OVER

    def close(self) -> None:
        """The request is over, or another relay serves it."""
        self._state = _OVER
        self._call = None  # It refers to us.

    def pause(self) -> None:
        """The client is slower than decode: read no more from decode."""
        self.is_paused = True
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        self.is_paused = False
        if self._call is not None:
            self._call.resume()

    # What the client's stream asks (StreamSource).

    @property
    def num_streamed_bytes(self) -> int:
        return self.num_bytes if self._state is _RELAYING else 0

    @property
    def may_comment(self) -> bool:
        if self._state is _RELAYING:
            return self._is_event_stream and self._watch is not None and self._watch.is_between_events
        return self._head is None or self._is_good_stream(self._head)

    @property
    def stream_lines(self) -> bytes:
        """Decode's header lines. As a rule decode sends them before it waits for prefill; empty before that."""
        return b"" if self._head is None else self._lines_of(self._head)

    # What the call says (ResponseSink).

    def on_head(self, head: ResponseHead) -> None:
        self._head = head
        self._is_event_stream = head.content_type.lower().startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        num_before = self.num_bytes
        self.num_bytes = num_before + len(body)
        if self._state is _RELAYING:
            passed = body if self._watch is None else self._watch.feed(body)
            if passed:
                self._cycle.write(passed)
            if self._gaps is not None:
                self._gaps.add_piece()
            if passed is not body:  # An engine ends a stream after an error as if all was well.
                self._look_for_late_error()
            return
        if not num_before and not (self._api.begins_early and self._is_event_stream):
            self._owner.first_byte()
        if self._held:
            self._hold(body)
        else:
            self._held = body
        self._look_at_the_beginning()

    def on_end(self) -> None:
        head = self._head
        assert head is not None
        if self._state is _RELAYING:
            self._finish(head)
        elif head.status >= 400:
            self._refuse(head.status, self._error_in(head), head)
        elif self._held:
            self._end_held(head)
        else:
            self._owner.decode_lost(ResponseLost(f"it answered {head.status} with an empty body"))

    def on_lost(self, lost: ResponseLost) -> None:
        if lost.has_large_head and self._api.is_pooling:
            error = answer_head_too_large(MAX_HEADER_BYTES, self._api.for_less)
            self._owner.refused(DecodeRefusal(error.status, self._api.error_body(error), JSON, error.code))
            return
        is_early = self._state is _HOLDING and self._api.begins_early and self._is_event_stream and bool(self._held)
        self._owner.decode_lost(replace(lost, may_be_told=is_early))

    def _last_event(self, error: ApiError) -> bytes:
        is_torn = self._watch is not None and self._watch.is_torn
        return (b"\n\n" if is_torn else b"") + self._api.error_event(error)

    def _hold(self, body: bytes) -> None:
        if not isinstance(self._held, bytearray):
            self._held = bytearray(self._held)
        self._held += body

    def _end_held(self, head: ResponseHead) -> None:
        """Nothing has gone to the client, and the whole answer is here."""
        if problem := self._problem_of_held():
            self._break_off(problem)
        else:
            self._release(head)
            self._finish(head)

    def _look_for_late_error(self) -> None:
        message = self._watch.message() if self._watch is not None else None
        if message is not None:
            self._break_off(message)

    def _break_off(self, message: str) -> None:
        is_ours = message in UNPROVEN or message == self._marks.get(RECOMPUTED)  # That may be the client's own word.
        self._lose(ResponseLost(f"it broke off its answer: {message}", is_ours=is_ours))

    def _lose(self, lost: ResponseLost) -> None:
        if self._call is not None:
            self._call.close()
        self._owner.decode_lost(lost)

    def _problem_of_held(self) -> str:
        """Why the held bytes are no whole answer; empty: they are whole, as far as the API shows."""
        if not self._is_event_stream:
            return self._api.unfinished(self._held) if self._api.unfinished is not None else ""
        watch = self._api.watch(self._marks)
        watch.feed(bytes(self._held))
        return watch.problem_at_end()

    def _finish(self, head: ResponseHead) -> None:
        if self._watch is not None and (problem := self._watch.problem_at_end()):
            self._break_off(problem)
        if self._state is _OVER:
            return  # It was broken off above.
        self._state = _OVER
        self._cycle.end()
        self._owner.answered(head.status, self._end)

    def _look_at_the_beginning(self) -> None:
        head = self._head
        assert head is not None
        if head.status >= 400:
            if len(self._held) > MAX_ERROR_BYTES:
                self._abandon(head.status, self._error_in(head), head)
        elif self._cycle.has_stream_begun and not self._is_event_stream:
            self._break_off("it did not stream, as it was asked to")
        elif self._api.unfinished is not None and not self._is_event_stream:
            self._look_at_the_length()
        elif not self._is_event_stream and len(self._held) < (head.content_length or 0) <= MOST_AWAITED_BYTES:
            return
        elif why := first_mark(self._held, self._marks)[1]:
            self._break_off(why)
        elif not self._is_event_stream:
            self._release(head)
        else:
            self._look_at_the_first_event(head)

    def _look_at_the_length(self) -> None:
        if self._api.held is not None:
            self._api.held(len(self._held))
        elif len(self._held) > MAX_ANSWER_BYTES:
            self._break_off(f"it is longer than {MAX_ANSWER_BYTES} bytes")

    def _look_at_the_first_event(self, head: ResponseHead) -> None:
        # Early events may be long and come in many pieces: not every piece costs a search from the start.
        is_new = not self._api.begins_early or self._held.find(b"\n\n", max(0, self._num_looked_at - 1)) >= 0
        self._num_looked_at = len(self._held)
        begin, end = self._api.first_event(self._held) if is_new else (0, -1)
        if end < 0 and len(self._held) <= MAX_FIRST_EVENT_BYTES + self._api.max_echo_bytes(self._cycle.num_body_bytes):
            return
        event = bytes(self._held[begin:end]) if end >= 0 else b""
        if error := error_of(event):
            self._abandon(error.status, error.body, head)
        elif self._api.gives_up_first is not None and (why := self._api.gives_up_first(event)):
            self._break_off(why)
        else:
            self._release(head)

    def _error_in(self, head: ResponseHead) -> bytes:
        return from_engine(head.status, self._held, self._api.error_body)

    def _abandon(self, status: int, body: bytes, head: ResponseHead) -> None:
        """Answers the error now. Reads nothing more from decode."""
        if self._call is not None:
            self._call.close()
        self._refuse(status, body, head)

    def _refuse(self, status: int, body: bytes, head: ResponseHead) -> None:
        extra = b"".join([_LINE % header for header in head.headers if header[0] in _KEPT_ON_ERRORS])
        self._owner.refused(DecodeRefusal(status, body, JSON + extra))

    def _release(self, head: ResponseHead) -> None:
        """Sends status, headers and the held bytes to the client."""
        if self._api.begins_early and self._is_event_stream:
            self._owner.first_byte()
        gaps = self._owner.begins()
        held, self._held = bytes(self._held), b""
        self._state = _RELAYING
        if self._is_event_stream or (self._api.unfinished is None and len(held) != head.content_length):
            self._watch = self._api.watch(self._marks)  # Else the answer is whole, and was checked.
            held, self._end = self._watch.feed(held), self._watch.end
            self._gaps = gaps if self._is_event_stream else None
        else:
            self._end = held
        # A stream goes without decode's length, which counts neither comments nor an event that tells an error.
        length = None if self._is_event_stream else head.content_length
        self._cycle.start(head.status, self._lines_of(head), length, held)
        if self._watch is not None:
            self._look_for_late_error()

    def _lines_of(self, head: ResponseHead) -> bytes:
        lines = b"".join([_LINE % header for header in head.headers if header[0] not in _OURS])
        return lines + UNBUFFERED if self._is_event_stream else lines

    def _is_good_stream(self, head: ResponseHead) -> bool:
        return self._is_event_stream and head.status == _OK


_KEPT_ON_ERRORS: Final = frozenset((b"retry-after", b"www-authenticate"))
_LINE: Final = b"%b: %b\r\n"
_OK: Final = 200
