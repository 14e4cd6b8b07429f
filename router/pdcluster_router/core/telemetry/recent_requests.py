"""Rows of the status page for kept requests: with no more steps, and no longer texts, than a page can show.

A request has at most ``MAX_STEPS`` steps here; the ones between the first and the last become one. So a document has
at most some 200 KB of requests, whatever clients and engines wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from pdcluster_protocol.kept import KeptRequest, QueueAhead
from pdcluster_protocol.status_page import RecentRequest, StepRow
from pdcluster_router.core.telemetry.timeline import RequestStep, StepKind, timeline_of

MAX_STEPS: Final = 24
"""A request with two attempts of each role has 12."""
MAX_TEXT_CHARS: Final = 200


def recent_request(request: KeptRequest, fate: str, *, now_unix_s: float) -> RecentRequest:
    """The row of ``request``. If the clock was set back to before its end, the row tells that it has just ended."""
    steps = timeline_of(request)
    return RecentRequest(
        request_id=request.request_id,
        ended_s=round(max(0.0, now_unix_s - (request.ended_at_unix_s or now_unix_s)), 1),
        fate=fate,
        client=request.client,
        model=request.model,
        alias_of=request.alias_of,
        path=request.path,
        status=request.status,
        outcome=request.outcome,
        error=request.error,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        read_s=request.read_s,
        first_byte_s=_first_byte_s(steps),
        total_s=request.total_s,
        steps=tuple(_rows(_shortened(steps), _ahead(request.ahead))),
    )


def _first_byte_s(steps: Sequence[RequestStep]) -> float | None:
    return next((step.at_s for step in steps if step.kind is StepKind.FIRST_BYTE), None)


def _shortened(steps: Sequence[RequestStep]) -> Sequence[RequestStep]:
    """The steps and the end behind them, with one step in place of the middle ones if they are too many."""
    num_left_out = len(steps) - MAX_STEPS - 1
    if num_left_out <= 0:
        return steps
    begin, end = MAX_STEPS // 2, MAX_STEPS // 2 + num_left_out + 1
    between = RequestStep(steps[begin].at_s, StepKind.FAILURE, f"{end - begin} more steps")
    return [*steps[:begin], between, *steps[end:]]


def _rows(steps: Sequence[RequestStep], ahead: str) -> list[StepRow]:
    """``ahead``: behind the text of the step in the queue."""
    return [
        StepRow(
            step.kind.value,
            round(after.at_s - step.at_s, 6),
            f"{step.text}{ahead if step.kind is StepKind.QUEUE else ''}"[:MAX_TEXT_CHARS],
        )
        for step, after in pairwise(steps)
    ]


def _ahead(ahead: QueueAhead | None) -> str:
    """The requests that were let in meanwhile, by key. Empty: none were, or they are not remembered any more."""
    if ahead is None or not ahead.num_known:
        return ""
    lines = [f"{line.num_requests} {f'of {line.client}' if line.client else 'without a key'}" for line in ahead.lines]
    others = ["others"] if ahead.num_other_keys or ahead.num_known < ahead.num_requests else []
    return f", behind {', '.join([*lines, *others])}"
