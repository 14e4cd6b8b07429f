"""When strips are gathered, and how they lie: known answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdcluster_connector.core.gathering import (
    MOST_BUFFER_BYTES,
    MOST_STRIP_BYTES,
    is_small_strip,
    may_have_strips,
    num_writes,
    plan_gathers,
)
from pdcluster_connector.core.link import plan_link
from pdcluster_connector.core.ranges import CopyShape, GroupSlice, plan_ranges
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

TOKENS = 16


def rank_of(tp_rank: int, tp_size: int, head_bytes: int = 512, heads: int = 8, *, padding: int = 0) -> RankLayout:
    """``head_bytes``: of one token."""
    size = heads // tp_size * TOKENS * head_bytes
    region = RegionLayout("a", 0, 0, 1000, size + padding, size, RegionKind.HEADS, heads, TOKENS)
    return RankLayout(tp_rank, tp_size, (region,))


def shape_between(prefill: RankLayout, decode: RankLayout) -> CopyShape:
    (shape,) = plan_link(prefill, decode).shapes
    return shape


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "head_bytes", "is_small"),
    [
        (4, 8, 512, True),  # one head of 8 KiB
        (4, 8, 513, False),
        (2, 4, 512, False),
        (1, 4, 256, True),
        (1, 1, 64, False),  # whole blocks
        (2, 1, 64, False),  # decode's block has strips of other ranks too
    ],
)
def test_strips_of_one_head_or_less_are_small(prefill_tp: int, decode_tp: int, head_bytes: int, is_small: bool) -> None:
    prefill = rank_of(0, prefill_tp, head_bytes)
    assert is_small_strip(shape_between(prefill, rank_of(0, decode_tp, head_bytes))) is is_small


def test_a_gap_behind_decodes_pages_keeps_strips_apart() -> None:
    assert is_small_strip(shape_between(rank_of(0, 1, 64), rank_of(0, 2, 64)))
    assert not is_small_strip(shape_between(rank_of(0, 1, 64), rank_of(0, 2, 64, padding=64)))


def test_a_rank_has_strips_where_a_larger_tp_can_cut_its_pages() -> None:
    assert may_have_strips(rank_of(0, 1))
    assert may_have_strips(rank_of(3, 4))
    assert not may_have_strips(rank_of(0, 8))  # one head
    assert not may_have_strips(rank_of(0, 1, head_bytes=1024))
    assert not may_have_strips(RankLayout(0, 1, ()))


def test_neighbours_on_decode_are_one_write_from_the_buffer() -> None:
    shape = shape_between(rank_of(0, 4), rank_of(1, 8))
    ranges = plan_ranges(shape, GroupSlice(0, 4 * TOKENS, (7, 3, 9, 5), (22, 20, 30, 21)))
    (gather,) = plan_gathers(shape, ranges)
    strip, block = MOST_STRIP_BYTES, 2 * MOST_STRIP_BYTES
    assert gather.sources.tolist() == [strip + block * at for at in (3, 5, 7, 9)]
    assert gather.writes.source.tolist() == [0, 3 * strip]
    assert gather.writes.target.tolist() == [20 * strip, 30 * strip]
    assert gather.writes.num_bytes.tolist() == [3 * strip, strip]
    assert num_writes(ranges, (gather,)) == 2
    assert num_writes(ranges, ()) == 4


@pytest.mark.parametrize(("theirs", "is_gathered"), [((20, 22, 21, 30), True), ((20, 21, 30, 40), False)])
def test_strips_are_gathered_where_that_at_least_halves_the_writes(theirs: tuple[int, ...], is_gathered: bool) -> None:
    shape = shape_between(rank_of(0, 1, 64), rank_of(0, 8, 64))
    ranges = plan_ranges(shape, GroupSlice(0, 4 * TOKENS, (1, 2, 3, 4), theirs))
    assert bool(plan_gathers(shape, ranges)) is is_gathered


def test_nothing_to_push_is_nothing_to_gather() -> None:
    shape = shape_between(rank_of(0, 1, 64), rank_of(0, 8, 64))
    assert plan_gathers(shape, plan_ranges(shape, GroupSlice(0, 0, (), ()))) == ()


def test_a_buffer_is_bounded() -> None:
    shape = shape_between(rank_of(0, 4), rank_of(0, 8))
    blocks = tuple(range(1, 301))
    gathers = plan_gathers(shape, plan_ranges(shape, GroupSlice(0, 300 * TOKENS, blocks, blocks)))
    assert [gather.num_bytes for gather in gathers] == [MOST_BUFFER_BYTES, MOST_BUFFER_BYTES, 44 * MOST_STRIP_BYTES]
    assert np.concatenate([gather.sources for gather in gathers]).tolist() == [
        2 * MOST_STRIP_BYTES * at for at in blocks
    ]


def test_state_is_never_gathered() -> None:
    shape = shape_between(rank_of(0, 1, 64), rank_of(0, 8, 64))
    assert not is_small_strip(replace(shape, is_state=True))
