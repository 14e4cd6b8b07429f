"""Rows of the bandwidth benchmark, from transfers made by hand."""

from __future__ import annotations

from benchmarks.bandwidth_figures import build_rows, format_rows
from benchmarks.block_tables import Placement
from benchmarks.rank_processes import Cost, Moved
from benchmarks.references import Way


def moved(seconds: float) -> Moved:
    """1 GB; the drivers have a tenth of a core and the senders half of one."""
    return Moved(seconds, 10**9, Cost(seconds / 10, seconds / 2))


ROUNDS = [
    {Way.CONNECTOR: moved(2.5), Way.POLL: moved(2.0), Way.BLOCKING: moved(4.0), Way.SOCKET: moved(1.0)},
    {Way.CONNECTOR: moved(2.0), Way.POLL: moved(2.0), Way.BLOCKING: moved(4.0), Way.SOCKET: moved(1.0)},
]


def test_ours_is_compared_with_the_best_reference_and_with_the_best_of_bare_mooncake() -> None:
    table = format_rows(build_rows("loopback", "2→1", 16, Placement.USED, ROUNDS))
    (ours,) = (line for line in table.splitlines() if f"| {Way.CONNECTOR.value} |" in line)
    assert ours.split(" | ")[5:] == [
        *("0.45 (0.40..0.50)", "0.45 (0.40..0.50)", "0.90 (0.80..1.00)"),
        *("10% (10%..10%)", "50% (50%..50%) |"),
    ]
