"""Tells from an engine's metrics whether it has anything left to do. Pure: reads no clock and asks no engine.

Source of truth: vLLM 0.32 ``v1/metrics/loggers.py`` (the names) and ``v1/core/sched/scheduler.py`` (what counts as
running or waiting; requests that wait for KV are waiting). An ended request is neither running nor waiting, even while
its KV is still pushed, or a revoked writer is not fenced. But vLLM keeps its blocks until the connector gives them
back. So blocks in use show pushes and reservations under way; no other metric does.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_KV_SHARE: Final = "vllm:kv_cache_usage_perc"
_ENDED: Final = "vllm:request_success_total"
"""Requests that have ended, in any way. vLLM does not show it before the first."""
_LABELS: Final = r"\{(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*\}"
_SAMPLE: Final = re.compile(
    rf"\s*(?P<name>{_RUNNING}|{_WAITING}|{_KV_SHARE}|{_ENDED})(?![\w:])(?:\s*{_LABELS})?\s*(?P<value>\S*)"
)
"""A line of one of our metrics: its name, labels, value, and perhaps a timestamp. A cut line has no value."""


@dataclass(frozen=True, slots=True)
class Work:
    """One look at an engine: the work of all of its data-parallel ranks together."""

    num_running: int
    num_waiting: int
    kv_share: float
    """Sum of the used shares of KV memory; 0 when no block is held."""
    num_ended: int
    """Requests that have ended since the engine started."""

    @property
    def is_none(self) -> bool:
        return not (self.num_running or self.num_waiting or self.kv_share)

    def __str__(self) -> str:
        return f"{self.num_running} running, {self.num_waiting} waiting, {self.kv_share:.2%} of KV memory held"


def parse_work(text: str) -> Work | None:
    """The work that metrics in Prometheus' text format show; None: they say nothing of requests, or no number."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            value = _number(found["value"])
            if value is None:
                return None
            sums[found["name"]] = sums.get(found["name"], 0.0) + value
    if not {_RUNNING, _WAITING, _KV_SHARE} <= sums.keys():
        return None
    return Work(int(sums[_RUNNING]), int(sums[_WAITING]), sums[_KV_SHARE], int(sums.get(_ENDED, 0)))


def _number(text: str) -> float | None:
    """The finite number of 0 or more that ``text`` is; None: it is none. Prometheus also has ``NaN`` and ``+Inf``."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


class IdleWatch:
    """Measures for how long an engine has had nothing to do. One owner."""

    def __init__(self, idle_s: float) -> None:
        """``idle_s``: seconds without work, and without a break, after which the engine is idle."""
        self._idle_s = idle_s
        self._idle_since: float | None = None
        self._num_ended = 0

    def hear(self, work: Work | None, *, now: float) -> bool:
        """Whether the engine is idle. ``work``: seen now; None: unknown. ``now``: monotonic seconds."""
        if work is None or not work.is_none:
            self._idle_since = None
            return False
        # A request may have come and ended between two looks, and its sender may send more.
        if self._idle_since is None or work.num_ended != self._num_ended:
            self._idle_since = now
        self._num_ended = work.num_ended
        return now - self._idle_since >= self._idle_s
