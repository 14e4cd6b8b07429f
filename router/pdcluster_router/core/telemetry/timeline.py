"""The timeline of a kept request: its steps in words, from its first byte to its end.

    at_s     kind          text
    -0.120   read          its head and body come
    -0.002   turn          waits for its turn behind others
     0.000   queue         waits to be admitted        its arrival: the router has taken it up
     0.003   decode_sent   sent to decode-0
     ...
     0.080   end           ended

Each step lasts until the next one begins, so the steps add up to the whole time. ``pdcluster why`` prints them, and the
status page draws them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from pdcluster_protocol.kept import KeptRequest, Milestone, Moment


class StepKind(Enum):
    """A step that a milestone begins has the milestone's value."""

    READ = "read"
    TURN = "turn"
    QUEUE = "queue"
    DECODE_SENT = Milestone.DECODE_SENT.value
    RESERVED = Milestone.RESERVED.value
    PREFILLS_LOCALLY = Milestone.PREFILLS_LOCALLY.value
    PREFILL_SENT = Milestone.PREFILL_SENT.value
    PREFILL_QUEUED = Milestone.PREFILL_QUEUED.value
    PREFILL_COMPUTES = Milestone.PREFILL_COMPUTES.value
    PREFILL_REPLIED = Milestone.PREFILL_REPLIED.value
    FIRST_BYTE = Milestone.FIRST_BYTE.value
    FAILURE = "failure"
    """Something has failed, or an answer begins that comes to nothing; another try follows, or the end."""
    END = "end"


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One step. ``at_s``: when it begins, seconds from the request's arrival; below 0 before it."""

    at_s: float
    kind: StepKind
    text: str


def timeline_of(request: KeptRequest) -> list[RequestStep]:
    """The steps, in the order of time; empty if no time of the request is known."""
    if request.total_s is None and request.read_s is None:
        return []
    steps = [*_before(request), *map(_step_of, request.moments)]
    _drop_early_answers(steps)
    is_over = request.ended_at_unix_s is not None
    steps.append(RequestStep(request.total_s or 0.0, StepKind.END, "ended" if is_over else "now"))
    return sorted(steps, key=lambda step: step.at_s)


def _before(request: KeptRequest) -> Iterator[RequestStep]:
    """The steps before the first engine was asked."""
    turn_s = request.turn_s or 0.0
    if request.read_s is not None:
        yield RequestStep(-request.read_s - turn_s, StepKind.READ, "its head and body come")
    if turn_s:
        yield RequestStep(-turn_s, StepKind.TURN, "waits for its turn behind others")
    if request.queue_s is not None:
        yield RequestStep(0.0, StepKind.QUEUE, "waits to be admitted")


def _drop_early_answers(steps: list[RequestStep]) -> None:
    """Makes first bytes of decode engines before the last one failures: those answers came to nothing."""
    last_sent = max((at for at, step in enumerate(steps) if step.kind is StepKind.DECODE_SENT), default=0)
    for at, step in enumerate(steps[:last_sent]):
        if step.kind is StepKind.FIRST_BYTE:
            steps[at] = replace(step, kind=StepKind.FAILURE)


def _step_of(moment: Moment) -> RequestStep:
    form = HAPPENED.get(moment.what)
    if form is None:
        return RequestStep(moment.at_s, StepKind.FAILURE, _failure(moment))
    if moment.what == Milestone.FIRST_BYTE.value and not moment.engine:
        form = "first byte to the client"  # From an access log, which does not name the engine.
    text = form.format(engine=moment.engine, attempt=moment.attempt)
    return RequestStep(moment.at_s, StepKind(moment.what), text)


def _failure(moment: Moment) -> str:
    attempt = f"attempt {moment.attempt}: " if moment.attempt else ""
    engine = f" {moment.engine}" if moment.engine else ""
    return f"{attempt}{moment.what}{engine}{': ' if moment.reason else ''}{moment.reason}"


HAPPENED: Final = {
    Milestone.DECODE_SENT.value: "sent to {engine}",
    Milestone.RESERVED.value: "{engine} has reserved blocks for its KV",
    Milestone.PREFILLS_LOCALLY.value: "{engine} computes the rest of the prompt itself",
    Milestone.PREFILL_SENT.value: "attempt {attempt}: sent to {engine}",
    Milestone.PREFILL_QUEUED.value: "attempt {attempt}: waits in the queue of {engine}",
    Milestone.PREFILL_COMPUTES.value: "attempt {attempt}: {engine} computes the prompt",
    Milestone.PREFILL_REPLIED.value: "attempt {attempt}: {engine} has done its part",
    Milestone.FIRST_BYTE.value: "first byte from {engine}",
}
"""By the moment's ``what``; all others are failures."""
