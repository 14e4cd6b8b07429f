"""Byte ranges of known cases; the law over all cases is in ``tests/property/test_link.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdcluster_connector.core.ranges import (
    ByteRanges,
    CopyShape,
    Grid,
    GroupSlice,
    MissingBlockError,
    bytes_of,
    plan_ranges,
    require_held,
)
from pdcluster_connector.core.tp_mapping import WHOLE, Share
from pdcluster_protocol.errors import ProtocolError

BLOCK = Grid(16, 100, 16, 100, 100, 0, 0)
"""16 tokens in 100 bytes."""
WHOLE_BLOCKS = CopyShape(0, BLOCK, BLOCK, 16, 16, 1, 100, WHOLE)


def rows(ranges: ByteRanges) -> list[tuple[int, int, int]]:
    return list(zip(ranges.source.tolist(), ranges.target.tolist(), ranges.num_bytes.tolist(), strict=True))


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        pytest.param([3, 4, 5], [7, 8, 9], [(300, 700, 300)], id="adjacent on both sides is one range"),
        pytest.param([3, 4, 5], [7, 9, 10], [(300, 700, 100), (400, 900, 200)], id="a gap on decode"),
        pytest.param([3, 5, 6], [7, 8, 9], [(300, 700, 100), (500, 800, 200)], id="a gap on prefill"),
        pytest.param([5, 4], [7, 6], [(400, 600, 200)], id="falling runs are adjacent too: a used pool hands them out"),
        pytest.param([3, 4, 5], [0, 8, 9], [(400, 800, 200)], id="decode's null block is left out"),
        pytest.param([0, 4, 5], [0, 8, 9], [(400, 800, 200)], id="null on both sides is outside of both windows"),
        pytest.param([], [], [], id="nothing"),
    ],
)
def test_known_ranges_of_whole_blocks(
    prefill: list[int], decode: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert rows(plan_ranges(WHOLE_BLOCKS, GroupSlice(0, 16 * len(prefill), prefill, decode))) == expected


def test_a_block_that_decode_wants_and_prefill_lacks_is_never_sent_as_something_else() -> None:
    with pytest.raises(MissingBlockError, match="no KV at token 16"):
        plan_ranges(WHOLE_BLOCKS, GroupSlice(0, 40, [3, 0, 5], [7, 8, 9]))


def test_a_slice_begins_inside_the_larger_block() -> None:
    large = Grid(64, 400, 16, 100, 100, 0, 0)
    shape = replace(WHOLE_BLOCKS, target=large)
    assert rows(plan_ranges(shape, GroupSlice(48, 80, [3, 4], [7, 9]))) == [(300, 3100, 100), (400, 3600, 100)]


def test_a_head_slice_of_larger_blocks_is_one_range_per_block() -> None:
    shape = replace(WHOLE_BLOCKS, target=Grid(16, 400, 16, 400, 100, 0, 200))
    assert rows(plan_ranges(shape, GroupSlice(0, 32, [1, 2], [5, 6]))) == [(100, 2200, 100), (200, 2600, 100)]


def test_a_page_that_is_cut_leaves_row_by_row() -> None:
    """Pages of 16 tokens with 2 rows of 32 bytes, into pages of 8 tokens with rows of 16."""
    shape = CopyShape(0, Grid(16, 64, 16, 64, 32, 2, 0), Grid(8, 32, 8, 32, 16, 2, 0), 8, 8, 2, 16, WHOLE)
    expected = [(64, 64, 16), (80, 128, 16), (96, 80, 16), (112, 144, 16)]
    assert rows(plan_ranges(shape, GroupSlice(0, 16, [1], [2, 4]))) == expected


def test_shares_of_a_prompt_are_its_stripes_whatever_the_steps_were() -> None:
    shape = replace(WHOLE_BLOCKS, share=Share(1, 2))
    blocks = list(range(1, 65))
    assert bytes_of(shape, [(0, 1024)]) == 2 * 16 * 100
    assert rows(plan_ranges(shape, GroupSlice(0, 1024, blocks, blocks))) == [(1700, 1700, 1600), (4900, 4900, 1600)]
    assert rows(plan_ranges(shape, GroupSlice(240, 288, [1, 2, 3], [4, 5, 6]))) == [(200, 500, 200)]


@pytest.mark.parametrize("page", [512, 528])
def test_pages_larger_than_a_stripe_are_dealt_in_turn(page: int) -> None:
    grid = Grid(page, 100, page, 100, 100, 0, 0)
    shapes = [CopyShape(0, grid, grid, page, page, 1, 100, Share(index, 2)) for index in range(2)]
    blocks = list(range(1, 6))
    dealt = [[source for source, _, _ in rows(plan_ranges(s, GroupSlice(0, 5 * page, blocks, blocks)))] for s in shapes]
    assert dealt == [[100, 300, 500], [200, 400]]


def test_state_is_one_block_for_a_request() -> None:
    grid = Grid(1, 100, 1, 100, 0, 0, 0)
    shape = CopyShape(0, grid, grid, 1, 1, 1, 90, WHOLE, is_state=True)
    assert rows(plan_ranges(shape, GroupSlice(0, 1, [3], [8]))) == [(300, 800, 90)]
    assert rows(plan_ranges(shape, GroupSlice(0, 0, [], []))) == []
    assert bytes_of(shape, [(0, 1)]) == 90


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ([7], "decode named 1 blocks in KV group 0 for tokens 10 to 40, which are in 3"),
        ([7, 8], "decode named 2 blocks in KV group 0 for tokens 10 to 40, which are in 3"),
        ([7, 8, 100], "decode reserved block 100 in KV group 0, and has blocks 0 to 99"),
        ([-1, 7, 8], "decode reserved block -1 in KV group 0, and has blocks 0 to 99"),
    ],
)
def test_blocks_that_decode_cannot_mean_are_refused(blocks: list[int], problem: str) -> None:
    with pytest.raises(ProtocolError, match=f"^{problem}$"):
        require_held(WHOLE_BLOCKS, GroupSlice(10, 40, [1, 2, 3], blocks), 100)


def test_blocks_that_decode_has_are_taken() -> None:
    require_held(WHOLE_BLOCKS, GroupSlice(10, 40, [1, 2, 3], [0, 98, 99]), 100)
    require_held(WHOLE_BLOCKS, GroupSlice(40, 40, [], []), 100)
