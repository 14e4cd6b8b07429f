"""The time between the pieces of one stream, counted for its model while the stream runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from pdcluster_router.core.telemetry.histogram import PER_TOKEN, Histogram


class StreamGaps:
    """Owned by the relay of the stream. Event loop only."""

    __slots__ = ("_gaps", "_last_at", "_now")

    def __init__(self, gaps: Histogram, now: Callable[[], float], first_at: float) -> None:
        """``gaps``: those of the model, with bounds ``PER_TOKEN``. ``now``: monotonic seconds. ``first_at``: when the
        stream's first piece came."""
        self._gaps = gaps
        self._now = now
        self._last_at = first_at

    def add_piece(self) -> None:
        """One more piece has come. It runs for each token: 0.3 microseconds (0044)."""
        now = self._now()
        gap_s = now - self._last_at
        self._last_at = now
        gaps = self._gaps  # ``Histogram.add``, without a call.
        gaps.counts[bisect_left(PER_TOKEN, gap_s)] += 1
        gaps.total += gap_s
