"""The benchmarks' ranks: real processes, side channel and Mooncake. Whoever moves a wrong byte is found out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.kv_shape import KvShape
from benchmarks.places import open_places
from benchmarks.rank_processes import RankError, RankProcesses, Tp, start_ranks
from benchmarks.ranks import Request
from benchmarks.references import Way

pytestmark = pytest.mark.slow

SHAPE = KvShape(block_size=16, num_blocks=9, num_layers=2, head_bytes=8)
WITH_PLACES = [way for way in Way if way.writes_blocks]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with open_places("loopback") as places, start_ranks(places, SHAPE, Tp(2, 1)) as started:
        yield started


def test_every_way_but_the_plain_socket_is_compared() -> None:
    assert set(Way) - set(WITH_PLACES) == {Way.SOCKET}


@pytest.mark.parametrize("way", list(Way))
def test_every_way_moves_the_right_bytes(ranks: RankProcesses, way: Way) -> None:
    requests = [Request(f"{way.name}-1", (1, 2), (4, 3)), Request(f"{way.name}-2", (5,), (7,))]
    assert ranks.move(way, requests).num_bytes == 3 * SHAPE.request_bytes(1)


@pytest.mark.parametrize("way", WITH_PLACES)
def test_a_block_that_another_request_has_overwritten_is_found(ranks: RankProcesses, way: Way) -> None:
    """Both are given decode's block 3, so one of them is wrong, however well each was moved."""
    requests = [Request(f"{way.name}-first", (1, 2), (3, 4)), Request(f"{way.name}-second", (5,), (3,))]
    with pytest.raises(RankError, match=rf"{way.value} has moved wrong bytes: decode rank 0: .*\(block 3\)"):
        ranks.move(way, requests)


def test_all_requests_of_a_step_are_one_batch_for_each_layer_and_lane(ranks: RankProcesses) -> None:
    one = ranks.move(Way.CONNECTOR, [Request("alone", (1,), (1,))])
    three = ranks.move(Way.CONNECTOR, [Request(f"of three {block}", (block,), (block,)) for block in (1, 2, 3)])
    assert one.num_batches == three.num_batches == 2 * SHAPE.num_layers


def test_a_reference_takes_no_batches(ranks: RankProcesses) -> None:
    assert ranks.move(Way.BLOCKING, [Request("plain", (1,), (1,))]).num_batches == 0
