"""What the references write: each byte of the request once, in the fewest ranges."""

from __future__ import annotations

import pytest
from benchmarks.kv_shape import KvShape, Range, TpRank, links_between, ranges_between

SHAPE = KvShape(block_size=16, num_blocks=10, num_layers=2, kv_heads=8, head_bytes=512)
ONE = TpRank(0, 1)


def test_neighbouring_whole_blocks_are_one_range_for_each_layer() -> None:
    assert ranges_between(SHAPE, (ONE, ONE), (1, 2), (5, 6)) == [
        Range(65536, 5 * 65536, 131072),
        Range(11 * 65536, 15 * 65536, 131072),
    ]


def test_blocks_that_fall_on_both_sides_are_neighbours_too() -> None:
    assert ranges_between(SHAPE, (ONE, ONE), (2, 1), (6, 5)) == ranges_between(SHAPE, (ONE, ONE), (1, 2), (5, 6))


def test_neighbours_on_one_side_only_stay_apart() -> None:
    assert len(ranges_between(SHAPE, (ONE, ONE), (1, 2), (6, 5))) == 4


def test_a_rank_with_half_of_the_heads_writes_its_half_of_each_block() -> None:
    rows = ranges_between(SHAPE, (TpRank(1, 2), ONE), (1,), (1,))
    assert rows[0] == Range(32768, 65536 + 32768, 32768)


@pytest.mark.parametrize(("prefill", "decode", "links"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (4, 2, 4), (2, 4, 4)])
def test_each_byte_of_decodes_blocks_is_written_once(prefill: int, decode: int, links: int) -> None:
    pairs = links_between(prefill, decode, SHAPE)
    assert len(pairs) == links
    ours, theirs = (3, 1, 2), (7, 4, 5)
    written = sorted(
        (to.rank, at)
        for source, to in pairs
        for row in ranges_between(SHAPE, (source, to), ours, theirs)
        for at in range(row.target, row.target + row.num_bytes, 512)
    )
    block = SHAPE.block_bytes(decode)
    wanted = sorted(
        (rank, (layer * SHAPE.num_blocks + number) * block + at)
        for rank in range(decode)
        for layer in range(SHAPE.num_layers)
        for number in theirs
        for at in range(0, block, 512)
    )
    assert written == wanted
