"""Writes one router's ``GET /pdcluster/status`` as text: the facts of its page ``/status``, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdcluster_cli.cluster.pool_text import describe_pool, table
from pdcluster_protocol.status_page import RecentRequest, StatusPage, StepRow
from pdcluster_router.core.telemetry.scrub import printable
from pdcluster_router.core.telemetry.timeline import StepKind
from pdcluster_router.core.telemetry.why import OK

MAX_REQUESTS: Final = 10
"""Number of newest requests that are shown, so that engines have half of a terminal's lines."""
MAX_WORD_CHARS: Final = 40
"""Longest part of a request id or a step that is shown, so that a row fits on a line."""
_HEAD: Final = ("ENDED", "REQUEST", "HOW", "BODY", "FIRST BYTE", "WHOLE", "LONGEST STEP BEFORE IT")


def describe_status(page: StatusPage, router: str) -> str:
    """The whole text. ``router``: the router that has answered."""
    lines = describe_pool(page.pool, router)
    if page.recent:
        lines += ["", *table([_HEAD, *map(_cells, page.recent[:MAX_REQUESTS])])]
    return "\n".join(map(printable, lines))


def _cells(request: RecentRequest) -> tuple[str, ...]:
    times = map(_seconds, (request.read_s, request.first_byte_s, request.total_s))
    return (f"{request.ended_s:.0f} s ago", _short(request.request_id), _how(request), *times, _longest(request.steps))


def _how(request: RecentRequest) -> str:
    after = " after a failure" if (request.fate, request.outcome) == ("failed", OK) else ""
    return f"{request.status or '-'} {request.error or request.outcome or 'a bug of the router'}{after}"


def _longest(steps: Sequence[StepRow]) -> str:
    """The longest step before the first byte."""
    kinds = [step.kind for step in steps]
    answer = StepKind.FIRST_BYTE.value
    before = steps[: kinds.index(answer)] if answer in kinds else steps
    longest = max(before, key=lambda step: step.took_s, default=None)
    return "" if longest is None else f"{longest.took_s:.3f} s {_short(longest.text)}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


def _short(word: str) -> str:
    return word if len(word) <= MAX_WORD_CHARS else f"{word[: MAX_WORD_CHARS - 3]}..."
