"""Histograms of seconds and of tokens: plain numbers while requests run, text when Prometheus reads them.

The text is made here where there are many series: the client library takes 60 ms for 256 engines, and all streams of
the router wait for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Final

FINE: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Bounds of buckets in seconds."""
COARSE: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Likewise, for series of which there may be hundreds."""
PER_TOKEN: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 2.0)
"""Bounds in seconds of one token: for as many series."""
TOKENS: Final = (0.0, 16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 131072.0)
"""Bounds in tokens, for as many series. The first is for prompts of which nothing is cached."""


class Histogram:
    """Counts and a total, in the unit of the bounds. ``counts`` has a number for each bound, and one for all above the
    last bound. One thread adds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = FINE) -> None:
        """``bounds``: ascending."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, number: float) -> None:
        """Counts ``number`` once more. A bound belongs to its own bucket, as Prometheus has it."""
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number

    def buckets(self) -> list[tuple[str, int]]:
        """Each bound as Prometheus writes it, with how many were not above it."""
        return list(zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True))


def histogram_text(name: str, about: str, series: Iterable[tuple[Mapping[str, str], Histogram]]) -> str:
    """A whole family in Prometheus' text format, or nothing without a series. ``series``: labels, each value of any
    text, and the numbers."""
    lines = [line for labels, histogram in series for line in _lines(name, labels, histogram)]
    return "\n".join((f"# HELP {name} {about}", f"# TYPE {name} histogram", *lines, "")) if lines else ""


def _lines(name: str, labels: Mapping[str, str], histogram: Histogram) -> list[str]:
    said = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    buckets = histogram.buckets()
    lines = [f'{name}_bucket{{{said},le="{bound}"}} {number}' for bound, number in buckets]
    return [*lines, f"{name}_count{{{said}}} {buckets[-1][1]}", f"{name}_sum{{{said}}} {histogram.total}"]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
