"""Figures from the samples of ``local_prefill.py``: waits of streams beside a request, rows of the table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final

from benchmarks.client import Streamed
from benchmarks.figures import Spread, ratios, spread, times


class Way(Enum):
    """Who computes the missing tokens."""

    PUSHED = "pushed"
    LOCAL = "decode itself"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. ``longest_wait_s``: the longest between two tokens of a stream beside it, mean over the streams."""

    ttft_s: float
    longest_wait_s: float | None


@dataclass(frozen=True, slots=True)
class Round:
    """One request of each way. ``step_s``: time between two tokens of an undisturbed stream; None without streams."""

    samples: Mapping[Way, Sample]
    step_s: float | None


COLUMNS: Final = (
    "decode has cached",
    "missing",
    "beside it",
    "TTFT pushed",
    "TTFT computed by decode",
    "computed / pushed",
    "undisturbed step",
    "longest step, pushed",
    "longest step, computed",
    "computed / pushed ",
)


def sample_of(asked: Streamed, streams: Sequence[Streamed]) -> Sample:
    """Time to first token of the request, and the longest waits of the streams before that token."""
    begun_at, ended_at = asked.begun_at, asked.token_times[0]
    waits = [longest_wait_s(one, begun_at, ended_at) for one in streams]
    return Sample(ended_at - begun_at, statistics.mean(waits) if waits else None)


def longest_wait_s(stream: Streamed, begun_at: float, ended_at: float) -> float:
    """The longest time between two tokens of which a part lies within these moments; 0 if there is none.

    Example: tokens at 1, 2, 5, 6; from 2.5 to 5.5 → 3.
    """
    gaps = pairwise(stream.token_times)
    return max((after - before for before, after in gaps if after > begun_at and before < ended_at), default=0.0)


def median_wait_s(streams: Sequence[Streamed], begun_at: float, ended_at: float) -> float | None:
    """The median time between two tokens that both came within these moments, over all streams; None if no two did."""
    waits = [
        after - before
        for one in streams
        for before, after in pairwise(one.token_times)
        if begun_at <= before and after <= ended_at
    ]
    return statistics.median(waits) if waits else None


def build_cells(cached: int, missing: int, beside: str, rounds: Sequence[Round]) -> tuple[str, ...]:
    """One line of the table."""
    pushed, local = ([taken.samples[way] for taken in rounds] for way in (Way.PUSHED, Way.LOCAL))
    ttfts = [one.ttft_s for one in pushed], [one.ttft_s for one in local]
    first = (f"{cached:,}", f"{missing:,}", beside, *map(_ms, ttfts), times(ratios(ttfts[1], ttfts[0])))
    steps = [taken.step_s for taken in rounds if taken.step_s is not None]
    waits = tuple([one.longest_wait_s for one in side if one.longest_wait_s is not None] for side in (pushed, local))
    if not steps or not all(waits):
        return (*first, "-", "-", "-", "-")
    return (*first, _ms(steps), *map(_ms, waits), times(ratios(waits[1], waits[0])))


def _ms(seconds: Sequence[float]) -> str:
    figure: Spread = spread(seconds)
    return f"{figure.median * 1000:,.1f} ({figure.low * 1000:,.1f}..{figure.high * 1000:,.1f})"
