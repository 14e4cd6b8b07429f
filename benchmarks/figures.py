"""Figures from a benchmark's samples: spreads over rounds, slopes, Markdown tables, pages in ``docs/``."""

from __future__ import annotations

import datetime
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of one figure over the rounds."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Median and range. At least one value. Example: 3, 1, 2 → 2 (1..3)."""
    taken = list(values)
    return Spread(statistics.median(taken), min(taken), max(taken))


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    """In each round, ours divided by theirs. Example: 2 and 6 over 1 and 2 → 2.5 (2..3)."""
    return spread(our / their for our, their in zip(ours, theirs, strict=True))


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that at least ``share`` of all values do not exceed. Example: 1..100 and 0.99 → 99."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The growth of y when x grows by 1 (least squares); 0 for fewer than two different x.

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


DOCS: Final = Path(__file__).parents[1] / "docs"


def write_page(name: str, title: str, body: str, folder: Path = DOCS, flags: str = "") -> Path:
    """A page in ``folder`` holds the title, the line of ``measured_by``, and the body. Returns the path of the page.

    The page's name is its program's name with hyphens: ``step_time`` writes ``step-time.md``.
    """
    path = folder / f"{name.replace('_', '-')}.md"
    path.write_text(f"# {title}\n\n{measured_by(name, flags)}\n{body.strip()}\n")
    return path


def measured_by(name: str, flags: str = "") -> str:
    """A line that says when, on how many cores and by which command a page was measured. ``flags``: the user's."""
    today, cores = datetime.datetime.now(datetime.UTC), os.cpu_count()
    command = " ".join(["python", "-m", f"benchmarks.{name}", *flags.split(), "--write"])
    return f"Measured on {today:%Y-%m-%d} with {cores} cores by `{command}`."


def format_minutes(seconds: float) -> str:
    """Whole minutes, at least one, for the estimate that each program prints first. Example: 95 → "about 2 minutes"."""
    minutes = max(1, round(seconds / 60))
    return f"about {minutes} minute{'s' if minutes > 1 else ''}"
