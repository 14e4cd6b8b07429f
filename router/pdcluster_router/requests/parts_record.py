"""The record of a request that is served in parts, for metrics, access log and ``pdcluster why``. It joins the
records of all parts. Decides nothing.

A part has a row and a trace line of its own too, under its own id. The request is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.telemetry.answer_facts import END_BYTES
from pdcluster_router.requests.part import PartCycle
from pdcluster_router.requests.record import Record
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.requests.unserved import facts_of
from pdcluster_router.services import Services
from pdcluster_router.telemetry.access_log import MAX_FAILURES, EndFacts
from pdcluster_router.telemetry.failures import Failure, FailureKind
from pdcluster_router.telemetry.kept import KeptRow, MomentPart, some_of
from pdcluster_router.telemetry.metrics import Outcome, Span

_WITHDRAWN: Final = FailureKind.WITHDRAWN
_NUM_FIELDS: Final = 5
"""Fields of a moment."""


class PartsRecord:
    """One request's record. Owned by its ``FanOut``; ``write`` ends it."""

    def __init__(
        self, services: Services, request: ClientRequest, parts: Sequence[PartCycle], num_choices: int
    ) -> None:
        self._services = services
        self._request_id = request.request_id
        self._received_at = request.received_at
        self._spans_of = request.trace
        self._model = request.terms.model
        self._parts = parts
        self._num_choices = num_choices
        self._begun = facts_of(request)
        self._outcome: Outcome | None = None
        self._failed_part: PartCycle | None = None
        self._failures: tuple[FailureKind, ...] = ()
        """The failures of the whole; parts have their own."""
        self._ended_at: float | None = None
        self._status: int | None = None
        self._error = ""
        self._part_began_s = 0.0
        self._first_byte_s = 0.0
        self._answer_end = b""
        self._told: EndFacts | None = None
        """The result of ``told``, once the record is written."""

    def first_byte(self) -> None:
        """The first bytes of any part's answer have come. The client may still get an error."""
        self._part_began_s = self._services.now() - self._received_at

    def began(self) -> None:
        """The client gets the first bytes of an answer that is no error."""
        self._services.metrics.took(Span.FIRST_BYTE, self._part_began_s)
        self._first_byte_s = self._services.now() - self._received_at

    def answered(self, status: int, end: bytes) -> None:
        """The client has the whole answer. ``end``: its last bytes."""
        self._answer_end = end[-END_BYTES:]
        self._end(Outcome.OK, status)

    def part_failed(self, part: PartCycle, status: int | None, code: str) -> None:
        """The request fails because of ``part``, whose outcome is known soon. ``status``: of the client's answer."""
        self._failed_part = part
        self._end(None, status, code)

    def unmergeable(self, part: PartCycle, status: int | None, code: str, reason: str) -> None:
        """The answer to ``part`` cannot become part of the whole's answer."""
        self._failures = (FailureKind.DECODE_LOST,)
        engine = part.teller.told().decode_engine if part.teller is not None else ""
        self._services.failures.tell(
            Failure(FailureKind.DECODE_LOST, part.request_id.decode(), engine=engine, reason=reason)
        )
        self._end(Outcome.LOST, status, code)

    def client_gone(self, doing: str) -> None:
        self._failures = (FailureKind.CLIENT_GONE,)
        self._services.failures.tell(Failure(FailureKind.CLIENT_GONE, self._request_id, reason=doing))
        self._end(Outcome.CLIENT_GONE, None)

    def write(self) -> None:
        """Writes the record. Call it once, when each part has an outcome."""
        self._told, services = self.told(), self._services
        told = self._told
        if told.outcome is not None:
            services.metrics.ended(told.outcome)
        if told.outcome is Outcome.OK:
            numbers = services.metrics.models.of(self._model)
            numbers.first_byte.add(self._first_byte_s)
            numbers.answered(told.trace, self._answer_end)
        services.metrics.took(Span.TOTAL, (self._ended_at or services.now()) - self._received_at)
        if services.kept.is_on:
            row = replace(self.row(), ended_at_unix_s=services.unix_now())
            services.kept.keep(row, has_failed=bool(told.failures))
        if self._spans_of is not None:
            services.tell_spans(self._spans_of, self.row(), self._received_at, len(self._parts))

    def _end(self, outcome: Outcome | None, status: int | None, code: str = "") -> None:
        self._ended_at = self._services.now()
        self._outcome, self._status, self._error = outcome, status, code

    @property
    def has_entered(self) -> bool:
        """Whether a part has left the queue for the engines."""
        return any(isinstance(part.teller, Record) for part in self._parts)

    @property
    def names(self) -> tuple[str, str]:
        return (self._request_id, "")

    def told(self) -> EndFacts:
        """The facts for the access log, once the client's answer is over."""
        if self._told is not None:
            return self._told
        told = [part.teller.told() for part in self._parts if part.teller is not None]
        failures = [kind for one in told for kind in one.failures if kind is not _WITHDRAWN]
        return EndFacts(
            outcome=self._outcome_now(),
            failures=(*failures, *self._failures)[:MAX_FAILURES],
            left_queue_at=max((one.left_queue_at for one in told), default=self._received_at),
            trace=self._trace(told),
            decode_engine=_joined(one.decode_engine for one in told),
            prefill_engine=_joined(one.prefill_engine for one in told),
            revision=_joined(dict.fromkeys(one.revision for one in told)),
            is_local_prefill=any(one.is_local_prefill for one in told),
            num_decodes=sum(one.num_decodes for one in told),
            num_prefills=sum(one.num_prefills for one in told),
            num_parts=len(self._parts),
            trace_id=self._begun.trace_id,
        )

    def row(self) -> KeptRow:
        """The row for ``pdcluster why``, also while the request runs."""
        rows = [part.teller.row() for part in self._parts if isinstance(part.teller, Record)]
        told, outcome = self.told(), self._outcome_now()
        trace = told.trace
        return replace(
            self._begun,
            total_s=(self._ended_at or self._services.now()) - self._received_at,
            queue_s=told.left_queue_at - self._received_at,
            status=self._status,
            outcome=outcome.value if outcome is not None else "",
            error=self._error,
            revision=told.revision,
            is_local_prefill=told.is_local_prefill,
            prompt_tokens=trace.prompt_tokens if trace is not None else None,
            cached_tokens=trace.cached_tokens if trace is not None else None,
            moments=some_of(self._moments(rows)),
            ahead=max(rows, key=lambda row: row.queue_s or 0.0).ahead if rows else None,
        )

    def unanswered(self) -> list[KeptRow]:
        """The rows of the parts whose answers are not whole. Empty once the request has ended."""
        if self._ended_at is not None:
            return []
        return [self._row_of(part) for part in self._parts if not part.response_complete]

    def _row_of(self, part: PartCycle) -> KeptRow:
        if isinstance(part.teller, Record):
            return part.teller.row()
        return replace(self._begun, request_id=part.request_id.decode("ascii"))

    def _outcome_now(self) -> Outcome | None:
        part = self._failed_part
        if part is None or part.teller is None:
            return self._outcome
        return part.teller.told().outcome

    def _trace(self, told: Sequence[EndFacts]) -> RequestTrace:
        """One trace line for all parts: each prompt's tokens once, the last reservation, and the longest prefill."""
        lines = [one.trace for one in told if one.trace is not None]
        prompts = [line for line in lines[:: self._num_choices] if line.prompt_tokens is not None]
        slow = max(lines, key=_prefill_s, default=None)
        return RequestTrace(
            transfer_id=TransferId(""),
            received_at=self._received_at,
            reserved_at=max((line.reserved_at for line in lines if line.reserved_at is not None), default=None),
            prefill_sent_at=slow.prefill_sent_at if slow is not None else None,
            prefill_replied_at=slow.prefill_replied_at if slow is not None else None,
            prompt_tokens=sum(line.prompt_tokens or 0 for line in prompts) if prompts else None,
            cached_tokens=sum(line.cached_tokens or 0 for line in prompts) if prompts else None,
        )

    def _moments(self, rows: Iterable[KeptRow]) -> list[MomentPart]:
        """The moments of all parts in order of time, with the failures of the whole and of parts in the queue."""
        happened = [moment for row in rows for moment in _split(row.moments) if moment[1] != _WITHDRAWN.value]
        ended_s = (self._ended_at or self._received_at) - self._received_at
        queued = [part.teller for part in self._parts if isinstance(part.teller, EndFacts)]
        kinds = [*self._failures, *(kind for one in queued for kind in one.failures if kind is not _WITHDRAWN)]
        happened += [(ended_s, kind.value, "", 0, "") for kind in kinds]
        return [field for moment in sorted(happened, key=lambda moment: moment[0]) for field in moment]


def _prefill_s(line: RequestTrace) -> float:
    if line.prefill_sent_at is None or line.prefill_replied_at is None:
        return -1.0
    return line.prefill_replied_at - line.prefill_sent_at


def _joined(names: Iterable[str]) -> str:
    return ",".join(filter(None, names))


def _split(moments: Sequence[MomentPart]) -> Iterable[tuple[MomentPart, ...]]:
    return (tuple(moments[at : at + _NUM_FIELDS]) for at in range(0, len(moments), _NUM_FIELDS))
