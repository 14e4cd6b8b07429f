"""Rows of the bandwidth benchmark, from transfers made by hand."""

from __future__ import annotations

import pytest
from benchmarks.bandwidth_figures import BandwidthRow, build_rows
from benchmarks.block_tables import Placement
from benchmarks.rank_processes import Cost, Moved
from benchmarks.references import Way


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
