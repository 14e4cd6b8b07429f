"""Byte ranges: applied to memory they copy exactly the wanted parts of the wanted blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_connector.core.regions import BlockSlice, ByteRanges, block_slice, plan_ranges
from pdcluster_connector.core.tp_mapping import Push, Sharding, plan_pushes

WHOLE = BlockSlice(100, 100, 0, 0, 100)


def rows(ranges: ByteRanges) -> list[tuple[int, int, int]]:
    return list(zip(ranges.source.tolist(), ranges.target.tolist(), ranges.num_bytes.tolist(), strict=True))


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        pytest.param([3, 4, 5], [7, 8, 9], [(300, 700, 300)], id="adjacent on both sides is one range"),
        pytest.param([3, 4, 5], [7, 9, 10], [(300, 700, 100), (400, 900, 200)], id="a gap on decode"),
        pytest.param([3, 5, 6], [7, 8, 9], [(300, 700, 100), (500, 800, 200)], id="a gap on prefill"),
        pytest.param([5, 4], [7, 6], [(500, 700, 100), (400, 600, 100)], id="descending is not adjacent"),
        pytest.param([3, 4, 5], [0, 8, 9], [(400, 800, 200)], id="decode's null block is left out"),
        pytest.param([], [], [], id="nothing"),
    ],
)
def test_known_ranges_of_whole_blocks(
    prefill: list[int], decode: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert rows(plan_ranges(prefill, decode, WHOLE)) == expected


def test_a_head_slice_is_one_range_per_block() -> None:
    part = BlockSlice(200, 400, 0, 200, 200)
    assert rows(plan_ranges([1, 2], [5, 6], part)) == [(200, 2200, 200), (400, 2600, 200)]


@given(st.lists(st.integers(1, 40), unique=True), st.randoms(use_true_random=False))
def test_ranges_never_overlap_and_move_each_block_once(decode: list[int], random: object) -> None:
    prefill = list(range(100, 100 + len(decode)))
    random.shuffle(prefill)  # type: ignore[attr-defined]  # hypothesis hands out random.Random
    ranges = plan_ranges(prefill, decode, WHOLE)
    source = np.repeat(np.arange(200, dtype=np.int64), 100)
    target = np.full(41 * 100, -1, np.int64)
    for start, to, num_bytes in rows(ranges):
        assert (target[to : to + num_bytes] == -1).all()
        target[to : to + num_bytes] = source[start : start + num_bytes]
    for block, expected in zip(decode, prefill, strict=True):
        assert (target[block * 100 : block * 100 + 100] == expected).all()
    assert ranges.total_bytes == 100 * len(decode) == ranges.num_blocks * 100


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_the_pushes_of_all_ranks_fill_every_byte_of_every_decode_rank(p_tp: int, d_tp: int, heads: int) -> None:
    prefill, decode = Sharding(p_tp, heads), Sharding(d_tp, heads)
    head_bytes, block = 6, 2
    for rank in range(d_tp):
        mine = decode.heads_of(rank)
        memory = np.full(3 * len(mine) * head_bytes, -1, np.int64)
        for push in plan_pushes(prefill, decode):
            if push.decode_rank != rank:
                continue
            sent = prefill.heads_of(push.prefill_rank)
            source = np.repeat(np.array(sent, np.int64), head_bytes)
            part = block_slice(prefill, decode, push, len(sent) * head_bytes, len(mine) * head_bytes)
            for start, to, num_bytes in rows(plan_ranges([0], [block], part)):
                memory[to : to + num_bytes] = source[start : start + num_bytes]
        got = memory[block * len(mine) * head_bytes :].reshape(len(mine), head_bytes)
        assert (got == np.array(mine, np.int64)[:, None]).all()


def test_blocks_with_other_bytes_per_head_are_refused_with_both_values() -> None:
    prefill, decode = Sharding(2, 4), Sharding(1, 4)
    with pytest.raises(ValueError, match=r"200 bytes with 2 KV heads.*500 bytes with 4 KV heads"):
        block_slice(prefill, decode, Push(0, 0, range(2)), 200, 500)
