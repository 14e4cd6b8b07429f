"""The record of one request, for failures, metrics, trace, access log and ``pdcluster why``. Decides nothing.

Record   the request's trace line, spans, outcome and failures, as its exchange reports them
Verdict  how the request ends if it ends now
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.kept import Milestone
from pdcluster_protocol.metaserver import PrefillOutcome, failed
from pdcluster_protocol.params import LocalPrefill
from pdcluster_protocol.prefill_answer import PrefillAnswer
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.apis.openai_errors import NO_DECODE, ApiError, no_engine
from pdcluster_router.core.apis.rewrite import Bytes
from pdcluster_router.core.requests.dialect import Posted
from pdcluster_router.core.requests.pairing import Phase
from pdcluster_router.core.telemetry.histogram import COARSE
from pdcluster_router.engines.engine import Engine
from pdcluster_router.requests.relay import DecodeRefusal
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services
from pdcluster_router.telemetry.access_log import MAX_FAILURES, EndFacts
from pdcluster_router.telemetry.failures import Failure, FailureKind
from pdcluster_router.telemetry.kept import MAX_PARTS, KeptRow, MomentPart, reason_of, some_of
from pdcluster_router.telemetry.metrics import Outcome, Span
from pdcluster_router.telemetry.stream_gaps import StreamGaps

_DECODE_SENT: Final = Milestone.DECODE_SENT.value
_RESERVED: Final = Milestone.RESERVED.value
_PREFILLS_LOCALLY: Final = Milestone.PREFILLS_LOCALLY.value
_PREFILL_SENT: Final = Milestone.PREFILL_SENT.value
_PREFILL_QUEUED: Final = Milestone.PREFILL_QUEUED.value
_PREFILL_COMPUTES: Final = Milestone.PREFILL_COMPUTES.value
_PREFILL_REPLIED: Final = Milestone.PREFILL_REPLIED.value
_LEAST_QUEUED_S: Final = 0.001
"""Seconds: a shorter wait in prefill's queue is not remembered, for each moment takes memory."""
_FIRST_BYTE: Final = Milestone.FIRST_BYTE.value
_RESERVATION_SPAN, _PREFILL_SPAN, _FIRST_BYTE_SPAN, _TOTAL_SPAN = Span
_OK: Final = Outcome.OK
_WORDS: Final[dict[Outcome | None, str]] = {None: "", **{outcome: outcome.value for outcome in Outcome}}
"""Module constants, because each request reads them. Python 3.11 takes ten times as long to find a member in its Enum,
and an Enum's ``value`` is a function in Python."""


class Record:
    """One request's record. ``write`` ends it."""

    __slots__ = (
        "_attempt",
        "_client_address",
        "_decode",
        "_decode_name",
        "_error",
        "_failures",
        "_is_local_prefill",
        "_is_one_stream",
        "_is_part",
        "_is_stream",
        "_line",
        "_model",
        "_model_text",
        "_moments",
        "_num_decodes",
        "_num_prefills",
        "_outcome",
        "_path",
        "_prefill",
        "_read_s",
        "_request_id",
        "_sent_at",
        "_services",
        "_started_at",
        "_trace",
        "_trace_id",
        "_turn_s",
        "_turns_ahead",
    )

    def __init__(self, services: Services, request: ClientRequest, transfer_id: TransferId, started_at: float) -> None:
        self._services = services
        self._request_id = request.request_id
        self._trace, self._trace_id = request.trace, request.trace_id
        self._client_address = request.client_address
        self._path = request.path
        self._model = request.terms.model
        self._model_text = request.body.model_text
        self._is_stream = request.body.is_stream
        self._read_s, self._turn_s = request.read_s, request.turn_s
        self._turns_ahead = request.turns_ahead
        self._is_part = request.is_part
        self._is_one_stream = request.body.is_stream and request.has_transfer
        """Whether the answer is a stream of one sequence, for sure: decode alone serves those of several."""
        self._started_at = started_at
        self._attempt = 0
        self._sent_at = 0.0
        self._decode: Engine | None = None
        self._decode_name = ""
        self._prefill = ""
        self._num_decodes = self._num_prefills = 0
        self._failures: tuple[FailureKind, ...] = ()
        self._outcome: Outcome | None = None
        self._error = ""
        self._moments: list[MomentPart] = []
        """The fields of each moment, one after the other: seconds, what, engine, attempt, reason."""
        self._is_local_prefill = not request.has_transfer
        if self._is_local_prefill:
            services.metrics.num_local_prefills += 1
        self._line = RequestTrace(
            transfer_id=transfer_id,
            request_id=request.request_id,
            received_at=request.received_at,
            client=request.client,
        )

    def renewed(self, transfer_id: TransferId) -> None:
        """The request has a new transfer id."""
        self._line.transfer_id = transfer_id
        self._line.first_byte_at = None
        self._attempt = 0
        self._services.metrics.decode_resent.inc()

    def decode_sent(self, engine: Engine | None) -> None:
        self._decode = engine
        self._decode_name = engine.name if engine is not None else ""
        self._num_decodes += 1
        self._sent_at = now = self._services.now()
        self._moments += (now - self._line.received_at, _DECODE_SENT, self._decode_name, 0, "")

    def reserved(self, reservation: Posted) -> None:
        self._line.reserved_at = now = self._services.now()
        self._line.prompt_tokens = reservation.num_prompt_tokens
        self._line.cached_tokens = reservation.remote_cached_tokens
        self._is_local_prefill = False  # The decode engine before may have set it, and then failed.
        self._services.metrics.took(_RESERVATION_SPAN, now - self._line.received_at)
        self._moments += (now - self._line.received_at, _RESERVED, self._decode_name, 0, "")

    def prefills_locally(self, said: LocalPrefill) -> None:
        self._line.prompt_tokens = said.num_prompt_tokens
        self._line.cached_tokens = said.num_prompt_tokens - said.num_local_tokens
        self._is_local_prefill = True
        self._moments += (self._services.now() - self._line.received_at, _PREFILLS_LOCALLY, self._decode_name, 0, "")

    def prefill_sent(self, attempt: int, engine: str) -> None:
        self._attempt = attempt
        self._prefill = engine
        self._num_prefills += 1
        self._line.prefill_sent_at = now = self._services.now()
        self._line.prefill_replied_at = None
        self._moments += (now - self._line.received_at, _PREFILL_SENT, engine, attempt, "")

    def prefill_replied(self, said: PrefillAnswer, *, is_well: bool) -> float:
        """``is_well``: whether prefill has answered without an error. Returns how long that took, in seconds."""
        self._line.prefill_replied_at = now = self._services.now()
        seconds = now - (self._line.prefill_sent_at or now)
        self._services.metrics.took(_PREFILL_SPAN, seconds)
        if is_well:
            at_s = now - self._line.received_at
            if said.pdcluster_computed_s is not None:
                self._add_prefill_times(said.pdcluster_queued_s or 0.0, said.pdcluster_computed_s, at_s, seconds)
            self._moments += (at_s, _PREFILL_REPLIED, self._prefill, self._attempt, "")
        return seconds

    def _add_prefill_times(self, queued_s: float, computed_s: float, at_s: float, seconds: float) -> None:
        """Adds when prefill's queue and its compute began, which ended ``at_s`` after the request arrived; the whole
        call took ``seconds``. Numbers that cannot be are dropped: an engine may say anything."""
        if not 0 <= computed_s <= computed_s + queued_s <= seconds:
            return
        if queued_s >= _LEAST_QUEUED_S:
            self._moments += (at_s - computed_s - queued_s, _PREFILL_QUEUED, self._prefill, self._attempt, "")
        self._moments += (at_s - computed_s, _PREFILL_COMPUTES, self._prefill, self._attempt, "")

    def first_byte(self) -> None:
        """Decode's answer comes. The client may still get another one: of an engine that is asked next, or an error."""
        line = self._line
        line.first_byte_at = now = self._services.now()
        self._moments += (now - line.received_at, _FIRST_BYTE, self._decode_name, 0, "")

    def begins(self) -> StreamGaps | None:
        """The client gets the answer whose first byte was the last one to come. Returns the counter of gaps,
        to be told of each further piece; None: its gaps do not count."""
        line, metrics = self._line, self._services.metrics
        if self._is_part or line.first_byte_at is None:
            return None
        metrics.took(_FIRST_BYTE_SPAN, line.first_byte_at - line.received_at)
        if not self._is_one_stream:
            return None
        numbers = metrics.models.known.get(self._model) or metrics.models.of(self._model)
        return StreamGaps(numbers.gaps, self._services.now, line.first_byte_at)

    def answered(
        self, status: int | None, outcome: Outcome, error: ApiError | DecodeRefusal | None = None, end: Bytes = b""
    ) -> None:
        """The client has its answer, or has left. ``status``: of the answer; None: the client got no whole answer.
        ``end``: the last bytes of decode's answer."""
        line, metrics = self._line, self._services.metrics
        line.ended_at = now = self._services.now()
        line.status = status
        self._outcome = outcome
        if error is not None:
            self._error = error.code
        if outcome is _OK and self._decode is not None and line.first_byte_at is not None:
            answered, seconds = self._decode.answered, line.first_byte_at - self._sent_at
            answered.counts[bisect_left(COARSE, seconds)] += 1  # ``Histogram.add``, without a call.
            answered.total += seconds
            if not self._is_part:
                numbers = metrics.models.known.get(self._model) or metrics.models.of(self._model)
                numbers.answered(line, end, now - line.first_byte_at if self._is_one_stream else None)
                answered, seconds = numbers.first_byte, line.first_byte_at - line.received_at
                answered.counts[bisect_left(COARSE, seconds)] += 1
                answered.total += seconds
        if not self._is_part:
            metrics.took(_TOTAL_SPAN, now - line.received_at)
            metrics.ended(outcome)

    def client_gone(self, doing: str, *, is_withdrawn: bool) -> Outcome:
        """The client has left; or, if ``is_withdrawn``, this part's whole has ended. Returns the outcome."""
        outcome = Outcome.LOST if is_withdrawn else Outcome.CLIENT_GONE
        if is_withdrawn:
            kind = FailureKind.WITHDRAWN
            self._note(kind, self._decode_name, 0)
            self._services.failures.count(kind)
        else:
            self.failed(FailureKind.CLIENT_GONE, doing)
        self.answered(None, outcome)
        return outcome

    def failed(self, kind: FailureKind, reason: str, engine: str = "") -> None:
        self._note(kind, engine, self._attempt, reason_of(reason))
        transfer_id = self._line.transfer_id
        self._services.failures.tell(Failure(kind, self._request_id, transfer_id, self._attempt, engine, reason))

    def _note(self, kind: FailureKind, engine: str, attempt: int, reason: str = "") -> None:
        self._failures = (*self._failures, kind)[:MAX_FAILURES]
        self._moments += (self._services.now() - self._line.received_at, kind.value, engine, attempt, reason)

    def write(self) -> None:
        services = self._services
        if services.trace.is_on:
            services.trace.write(self._line)
        if services.kept.is_on:
            services.kept.keep(self.row(services.unix_now()), has_failed=bool(self._failures))
        if self._trace is not None:
            services.tell_spans(self._trace, self.row(), self._line.received_at)

    def unanswered(self) -> tuple[()]:
        """Empty: this request has no parts."""
        return ()

    @property
    def names(self) -> tuple[str, str]:
        return (self._request_id, self._line.transfer_id)

    def row(self, ended_at_unix_s: float | None = None) -> KeptRow:
        """The row for ``pdcluster why``. ``ended_at_unix_s``: None: the request has not ended."""
        line, decode = self._line, self._decode
        # By position: to name 21 arguments takes as long as all else here.
        return KeptRow(
            self._request_id,
            line.transfer_id,
            self._trace_id,
            line.client,
            self._client_address,
            self._model_text,
            self._path,
            self._is_stream,
            ended_at_unix_s,
            (line.ended_at or self._services.now()) - line.received_at,
            self._read_s,
            self._turn_s,
            self._started_at - line.received_at,
            line.status,
            _WORDS[self._outcome],
            self._error,
            decode.revision if decode is not None else "",
            self._is_local_prefill,
            line.prompt_tokens,
            line.cached_tokens,
            self._moments if len(self._moments) <= MAX_PARTS else some_of(self._moments),
            self._turns_ahead,
        )

    def told(self) -> EndFacts:
        """The facts for the access log, once the client's answer is over."""
        decode = self._decode
        return EndFacts(
            outcome=self._outcome,
            failures=self._failures,
            left_queue_at=self._started_at,
            trace=self._line,
            decode_engine=self._decode_name,
            prefill_engine=self._prefill,
            revision=decode.revision if decode is not None else "",
            is_local_prefill=self._is_local_prefill,
            num_decodes=self._num_decodes,
            num_prefills=self._num_prefills,
            trace_id=self._trace_id,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the request ends if it ends now: the outcome for decode, the client's error, and the metrics' outcome."""

    outcome: PrefillOutcome
    error: ApiError | DecodeRefusal
    result: Outcome


UNDECIDED: Final = Verdict(failed("the request has ended"), no_engine("decode", NO_DECODE), Outcome.UNAVAILABLE)

NOT_DECODES_FAULT: Final = frozenset((Phase.PREFILLING, Phase.ANSWERING, Phase.DECODING, Phase.TRAILING))
"""Phases in which decode waits for prefill, or has begun its answer."""

DOING: Final = {
    Phase.AWAITING_RESERVATION: "waiting for the decode engine",
    Phase.PREFILLING: "waiting for the prefill engine",
    Phase.AWAITING_ANSWER: "waiting for decode's answer",
    Phase.LOCAL_PREFILL: "waiting for decode's own prefill",
    Phase.ANSWERING: "decoding",
    Phase.DECODING: "decoding",
    Phase.TRAILING: "waiting for prefill's reply",
}


def is_overloaded(refusal: DecodeRefusal) -> bool:
    """Whether decode is only overloaded: it answered 503 with ``Retry-After``."""
    return refusal.status == 503 and b"retry-after:" in refusal.headers.lower()
