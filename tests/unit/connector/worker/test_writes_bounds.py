"""Writes in flight are bounded: Mooncake refuses too many, and none that is under way can be stopped."""

from __future__ import annotations

import pytest

from pdcluster_connector.settings import MAX_WRITES_IN_FLIGHT
from pdcluster_connector.worker import batches, writes
from pdcluster_protocol.side_channel import Done
from unit.connector.worker.test_writes import BLOCK, Bench


def test_writes_in_flight_are_bounded_and_all_arrive() -> None:
    bench = Bench(num_blocks=MAX_WRITES_IN_FLIGHT + 100)
    bench.grant()
    bench.network.hold()
    bench.advance()
    assert len(bench.queue._in_flight) == MAX_WRITES_IN_FLIGHT
    bench.network.release()
    for _ in range(3):
        bench.advance()
    assert bench.has_landed()


def test_writes_in_flight_are_bounded_in_submits_too() -> None:
    bench = Bench(num_blocks=MAX_WRITES_IN_FLIGHT + 100, writes_per_submit=100)
    bench.grant()
    bench.network.hold()
    bench.advance()
    assert sum(flight.num_writes for flight in bench.queue._in_flight) == MAX_WRITES_IN_FLIGHT // 100 * 100
    bench.network.release()
    for _ in range(3):
        bench.advance()
    assert bench.has_landed()


@pytest.mark.parametrize("writes_per_submit", [1, 4, 100])
@pytest.mark.parametrize(("num_bytes", "num_blocks"), [(10 * BLOCK, 10), (10 * BLOCK + 1, 11), (1, 1)])
def test_bytes_in_flight_are_bounded_but_for_the_last_range_and_all_arrive(
    writes_per_submit: int, num_bytes: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "MAX_BYTES_IN_FLIGHT", num_bytes)
    monkeypatch.setattr(writes, "MAX_BYTES_IN_SUBMIT", max(1, num_bytes // 5))
    bench = Bench(num_blocks=50, writes_per_submit=writes_per_submit)
    bench.grant()
    bench.network.hold()
    for _ in range(2):
        bench.advance()
        assert sum(flight.num_writes for flight in bench.queue._in_flight) == num_blocks
        assert len(bench.queue._in_flight) >= min(5, num_blocks), "the link is never dry while one of them is looked at"
    bench.network.release()
    for _ in range(60):
        bench.advance()
    assert bench.has_landed()
    assert Done in map(type, bench.said)


def test_a_range_that_is_longer_than_a_submit_is_cut_up_and_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_BYTES_IN_SUBMIT", BLOCK // 3)
    bench = Bench(num_blocks=5)
    bench.grant()
    bench.network.hold()
    bench.advance()
    assert sum(flight.num_writes for flight in bench.queue._in_flight) == 4 * 5
    bench.network.release()
    bench.advance()
    assert bench.has_landed()
    assert Done in map(type, bench.said)
