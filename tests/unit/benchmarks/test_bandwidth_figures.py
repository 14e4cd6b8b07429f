"""Rows of the bandwidth benchmark, from transfers made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.bandwidth_figures import COLUMNS, BandwidthRow, build_rows, format_rows
from benchmarks.bandwidth_plot import draw
from benchmarks.block_tables import Placement
from benchmarks.rank_processes import Moved
from benchmarks.references import Way
from benchmarks.thread_time import Cost


def moved(seconds: float) -> Moved:
    """1,000 bytes; the drivers have a tenth of a core and the senders half of one."""
    return Moved(seconds, 1000, Cost(seconds / 10, seconds / 2))


ROUNDS = [
    {Way.CONNECTOR: moved(2.5), Way.POLL: moved(2.0), Way.BLOCKING: moved(4.0), Way.SOCKET: moved(1.0)},
    {Way.CONNECTOR: moved(2.0), Way.POLL: moved(2.0), Way.BLOCKING: moved(4.0), Way.SOCKET: moved(1.0)},
]


def rows() -> dict[Way, BandwidthRow]:
    return {row.way: row for row in build_rows("loopback", "2→1", 16, Placement.USED, ROUNDS)}


def test_ours_is_compared_with_the_best_reference_and_with_the_best_of_bare_mooncake() -> None:
    ours = rows()[Way.CONNECTOR]
    assert ours.to_best.median == pytest.approx(0.45)
    assert (ours.to_mooncake.low, ours.to_mooncake.high) == pytest.approx((0.8, 1.0))


def test_processor_time_is_a_share_of_the_transfers_time() -> None:
    ours = rows()[Way.CONNECTOR]
    assert ours.drivers.median == pytest.approx(0.1)
    assert ours.senders.median == pytest.approx(0.5)


def test_the_table_has_a_line_for_each_way() -> None:
    lines = format_rows(list(rows().values())).splitlines()
    assert len(lines) == 2 + len(Way)
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    draw(list(rows().values()), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
