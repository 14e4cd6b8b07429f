"""The calls to engines that a kept request made, and the steps of each call, from its moments.

    decode_sent   reserved   prefill_sent  prefill_queued  prefill_computes  prefill_replied    first_byte        end
    |-- reservation --|          |------------ prefill -----------------------------|-- first_token --|-- answer --|
    |                                            |- engine_queue -|--- compute -----|                 |
    |-- local_prefill ------------------------ or ----------------------------------------------------|

The router sees no moment between the hand-over and decode's first step, so these are one span. An engine that records
spans itself tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdcluster_protocol.kept import Milestone, Moment
from pdcluster_protocol.labels import Role


@dataclass(frozen=True, slots=True)
class CallStep:
    """One step of a call. Seconds since the request arrived."""

    name: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class EngineCall:
    """One call to an engine. ``calls_in`` fills it; later it does not change."""

    role: Role
    engine: str
    begin_s: float
    attempt: int = 0
    """Number of the prefill attempt; 0: it is a call to decode."""
    end_s: float = -1.0
    """-1: it has not ended."""
    error: str = ""
    """The kind of failure that it ended with."""
    marks: dict[str, float] = field(default_factory=dict)
    """When the call reached its milestones: the first byte of an answer, and the last of each other kind."""

    @property
    def steps(self) -> Iterator[CallStep]:
        """The steps of the call, in order of time. They do not overlap."""
        return self._of_decode() if self.role is Role.DECODE else self._of_prefill()

    def _of_prefill(self) -> Iterator[CallStep]:
        """None where prefill has not told them."""
        if _COMPUTES not in self.marks:
            return
        computes_s = min(max(self.marks[_COMPUTES], self.begin_s), self.end_s)
        queued_s = min(max(self.marks.get(_QUEUED, computes_s), self.begin_s), computes_s)
        if queued_s < computes_s:
            yield CallStep("engine_queue", queued_s, computes_s)
        yield CallStep("compute", computes_s, self.end_s)

    def _of_decode(self) -> Iterator[CallStep]:
        marks = self.marks
        decided_s = min((marks[one] for one in (_RESERVED, _LOCALLY) if one in marks), default=self.begin_s)
        if decided_s > self.begin_s or _RESERVED in marks:
            yield CallStep("reservation", self.begin_s, decided_s)
        first_s = marks.get(_FIRST_BYTE)
        if first_s is None:
            return
        name, since = ("first_token", _PREFILL_REPLIED) if self._has_pushed_kv else ("local_prefill", _LOCALLY)
        begin_s = max(decided_s, marks.get(since, first_s if self._has_pushed_kv else decided_s))
        if begin_s < first_s:
            yield CallStep(name, begin_s, first_s)
        yield CallStep("answer", max(first_s, decided_s), self.end_s)

    @property
    def _has_pushed_kv(self) -> bool:
        return _RESERVED in self.marks and _LOCALLY not in self.marks

    def close(self, at_s: float, error: str = "") -> None:
        """The call has ended, if it had not before. The first error counts."""
        self.error = self.error or error
        if self.end_s < 0:
            self.end_s = max(self.begin_s, at_s)


def calls_in(moments: Sequence[Moment], end_s: float, refusal: str) -> list[EngineCall]:
    """All calls in the order in which they were sent. ``end_s``: when the request ended: no call lasts longer.

    ``refusal``: the kind of error with which the last decode engine has refused the request; empty: it has not.
    """
    calls = _CallsOfRequest()
    for moment in moments:
        calls.add(moment, min(max(0.0, moment.at_s), end_s))
    if calls.decode is not None and refusal:
        calls.decode.error = calls.decode.error or refusal
    for call in calls.all:
        call.close(end_s)
    return calls.all


class _CallsOfRequest:
    """The calls of one request, moment by moment."""

    def __init__(self) -> None:
        self.all: list[EngineCall] = []
        self.decode: EngineCall | None = None
        """The newest call to decode."""
        self._prefill: EngineCall | None = None
        """The newest call to prefill for that call to decode."""

    def add(self, moment: Moment, at_s: float) -> None:
        what = moment.what
        if what == _DECODE_SENT:
            self._close_all(at_s)
            self.decode = EngineCall(Role.DECODE, moment.engine, at_s)
            self.all.append(self.decode)
            self._prefill = None
        elif what == _PREFILL_SENT:
            self._end_prefill(at_s)
            self._prefill = EngineCall(Role.PREFILL, moment.engine, at_s, moment.attempt)
            self.all.append(self._prefill)
        elif what in PREFILL_FAILURES:
            self._end_prefill(at_s, what)
        elif what in DECODE_FAILURES and self.decode is not None:
            self.decode.close(at_s, what)
        else:
            self._mark(what, at_s)

    def _mark(self, what: str, at_s: float) -> None:
        if what in (_QUEUED, _COMPUTES):
            if self._prefill is not None:
                self._prefill.marks[what] = at_s
            return
        if what == _PREFILL_REPLIED:
            self._end_prefill(at_s)
        if self.decode is not None and self.decode.end_s < 0:
            what = _LOCALLY if what == _EXHAUSTED else what
            self.decode.marks[what] = self.decode.marks.get(what, at_s) if what == _FIRST_BYTE else at_s

    def _end_prefill(self, at_s: float, error: str = "") -> None:
        if self._prefill is not None:
            self._prefill.close(at_s, error)

    def _close_all(self, at_s: float) -> None:
        for call in (self.decode, self._prefill):
            if call is not None:
                call.close(at_s)


_DECODE_SENT: Final = Milestone.DECODE_SENT.value
_RESERVED: Final = Milestone.RESERVED.value
_LOCALLY: Final = Milestone.PREFILLS_LOCALLY.value
_PREFILL_SENT: Final = Milestone.PREFILL_SENT.value
_QUEUED: Final = Milestone.PREFILL_QUEUED.value
_COMPUTES: Final = Milestone.PREFILL_COMPUTES.value
_PREFILL_REPLIED: Final = Milestone.PREFILL_REPLIED.value
_FIRST_BYTE: Final = Milestone.FIRST_BYTE.value
_EXHAUSTED: Final = "prefill_exhausted"
"""Decode computes the prompt itself from now on, or gives the request up."""
PREFILL_FAILURES: Final = frozenset(("prefill_failed", "prefill_timeout", "attempt_lost"))
DECODE_FAILURES: Final = frozenset(
    ("decode_unreached", "decode_lost", "decode_error", "decode_stalled", "reservation_lost")
)
"""Failures of the newest call to prefill, or to decode. The rest is the request's own."""
