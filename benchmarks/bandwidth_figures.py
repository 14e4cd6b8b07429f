"""Rows and table of ``push_bandwidth.py``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.block_tables import Placement
from benchmarks.figures import Spread, format_table, percent, ratios, spread, times
from benchmarks.rank_processes import Moved
from benchmarks.references import REFERENCES, Way

Round = dict[Way, Moved]

BARE_MOONCAKE: Final = (Way.POLL, Way.BLOCKING)
COLUMNS: Final = (
    "link",
    "TP",
    "block size",
    "blocks",
    "way",
    "GB/s",
    "to the best reference",
    "to the best of bare Mooncake",
    "drivers, of a core",
    "senders, of a core",
)


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """One way in one case. ``rate``: bytes/s; ``to_*``: ratio to a reference's rate; others: shares of a core."""

    link: str
    tp: str
    block_size: int
    placement: Placement
    way: Way
    rate: Spread
    to_best: Spread
    to_mooncake: Spread
    drivers: Spread
    senders: Spread


def build_rows(
    link: str, tp: str, block_size: int, placement: Placement, rounds: Sequence[Round]
) -> list[BandwidthRow]:
    """A row for each way. At least one round."""
    rates = {way: [_rate(taken[way]) for taken in rounds] for way in Way}
    best, mooncake = best_of(REFERENCES, rates), best_of(BARE_MOONCAKE, rates)
    return [
        BandwidthRow(
            link,
            tp,
            block_size,
            placement,
            way,
            rate=spread(rates[way]),
            to_best=ratios(rates[way], rates[best]),
            to_mooncake=ratios(rates[way], rates[mooncake]),
            drivers=spread(taken[way].cost.drivers / taken[way].seconds for taken in rounds),
            senders=spread(taken[way].cost.process / taken[way].seconds for taken in rounds),
        )
        for way in Way
    ]


def best_of(ways: Sequence[Way], rates: Mapping[Way, Sequence[float]]) -> Way:
    """The way whose rates have the highest median."""
    return max(ways, key=lambda way: spread(rates[way]).median)


def format_rows(rows: Sequence[BandwidthRow]) -> str:
    """A Markdown table."""
    return format_table(COLUMNS, map(_cells, rows))


def _rate(moved: Moved) -> float:
    return moved.num_bytes / moved.seconds


def _cells(row: BandwidthRow) -> tuple[str, ...]:
    return (
        row.link,
        row.tp,
        str(row.block_size),
        row.placement.value,
        row.way.value,
        f"{row.rate.median / 1e9:.2f} ({row.rate.low / 1e9:.2f}..{row.rate.high / 1e9:.2f})",
        times(row.to_best),
        times(row.to_mooncake),
        percent(row.drivers),
        percent(row.senders),
    )
