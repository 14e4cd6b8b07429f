"""Counts of what has happened in the last minutes, by kind, in a fixed number of steps of time.

    [.........|.........|.........|....    each step has its counts; the oldest one goes when a new one begins

Knows no clock. Costs an addition for each thing that happens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Counted = TypeVar("Counted", bound=Hashable)

NUM_STEPS: Final = 10
"""Steps in the span. The oldest one is forgotten whole, so the counts go back by up to a step less than the span."""


class RecentCounts(Generic[Counted]):
    """One owner."""

    __slots__ = ("_step_s", "_steps")

    def __init__(self, span_s: float) -> None:
        """``span_s``: how far back the counts go at most, in seconds."""
        self._step_s = span_s / NUM_STEPS
        self._steps: OrderedDict[int, Counter[Counted]] = OrderedDict()

    def add(self, kind: Counted, *, now: float) -> None:
        """One more thing of ``kind`` has happened. ``now``: monotonic seconds, no less than before."""
        step = int(now / self._step_s)
        counts = self._steps.get(step)
        if counts is None:
            self._forget_before(step - NUM_STEPS + 1)
            counts = self._steps[step] = Counter()
        counts[kind] += 1

    def counts(self, *, now: float) -> Counter[Counted]:
        """How many of each kind have happened within the span. Up to the oldest tenth of the span is left out."""
        self._forget_before(int(now / self._step_s) - NUM_STEPS + 1)
        return sum(self._steps.values(), Counter())

    def _forget_before(self, step: int) -> None:
        while self._steps and next(iter(self._steps)) < step:
            self._steps.popitem(last=False)
