"""What a benchmark's samples say: spreads over rounds, slopes and Markdown tables. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the rounds."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Median and range. At least one value. Example: 3, 1, 2 → 2 (1..3)."""
    taken = list(values)
    return Spread(statistics.median(taken), min(taken), max(taken))


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    """Ours over theirs, of the same round each. Example: 2 and 6 over 1 and 2 → 2.5 (2..3)."""
    return spread(our / their for our, their in zip(ours, theirs, strict=True))


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that at least ``share`` of all values do not exceed. Example: 1..100 and 0.99 → 99."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """How much y grows for each x, by least squares; 0 for fewer than two different x.

    Example: (0, 1), (1, 3), (2, 5) → 2.
    """
    if len({x for x, _ in points}) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ms(figure: Spread) -> str:
    """Seconds as milliseconds: median (least..most). Example: 0.002 (0.001..0.003) → "2 (1..3)"."""
    return f"{figure.median * 1000:,.0f} ({figure.low * 1000:,.0f}..{figure.high * 1000:,.0f})"


def times(figure: Spread) -> str:
    """A ratio: median (least..most). Example: "0.91 (0.90..0.93)"."""
    return f"{figure.median:.2f} ({figure.low:.2f}..{figure.high:.2f})"


def percent(figure: Spread) -> str:
    """A share: median (least..most). Example: 0.5 (0.4..0.6) → "50% (40%..60%)"."""
    return f"{figure.median:.0%} ({figure.low:.0%}..{figure.high:.0%})"
