"""Regions of two ranks are paired by layer, or refused by name."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.layout import RankPair, bytes_per_block, pair_regions
from pdcluster_connector.core.tp_mapping import Sharding, plan_pushes
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import RegionLayout


def ranks(prefill_tp: int, decode_tp: int, heads: int = 4) -> RankPair:
    prefill, decode = Sharding(prefill_tp, heads), Sharding(decode_tp, heads)
    return RankPair(prefill, decode, plan_pushes(prefill, decode)[-1])


def test_regions_pair_by_layer_name_whatever_their_order() -> None:
    ours = [RegionLayout("a", 0, 1000, 9, 64), RegionLayout("b", 0, 2000, 9, 64)]
    theirs = [RegionLayout("b", 0, 70, 5, 64), RegionLayout("a", 0, 10, 5, 64)]
    pairs = pair_regions(ours, theirs, ranks(1, 1))
    assert [(p.layer_name, p.source_base, p.target_base) for p in pairs] == [("a", 1000, 10), ("b", 2000, 70)]


def test_several_regions_of_a_layer_pair_in_order() -> None:
    ours = [RegionLayout("a", 0, 1, 9, 64), RegionLayout("a", 0, 2, 9, 64)]
    theirs = [RegionLayout("a", 0, 30, 5, 64), RegionLayout("a", 0, 40, 5, 64)]
    assert [(p.source_base, p.target_base) for p in pair_regions(ours, theirs, ranks(1, 1))] == [(1, 30), (2, 40)]


def test_a_layer_that_one_side_lacks_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"b\[0\]"):
        pair_regions([RegionLayout("a", 0, 1, 9, 64)], [RegionLayout("b", 0, 1, 9, 64)], ranks(1, 1))


def test_blocks_of_other_sizes_are_refused_with_the_cure() -> None:
    with pytest.raises(ProtocolError, match=r"64 bytes.*128 bytes.*--block-size"):
        pair_regions([RegionLayout("a", 0, 1, 9, 64)], [RegionLayout("a", 0, 1, 9, 128)], ranks(1, 1))


def test_unequal_tp_moves_the_right_part() -> None:
    # TP 2 -> TP 1: the last push is prefill rank 1, heads 2..3 of 4.
    (pair,) = pair_regions([RegionLayout("a", 0, 1, 9, 64)], [RegionLayout("a", 0, 1, 9, 128)], ranks(2, 1))
    assert (pair.part.prefill_offset, pair.part.decode_offset, pair.part.num_bytes) == (0, 64, 64)


def test_decode_counts_the_same_bytes_that_prefill_writes() -> None:
    theirs = [RegionLayout("a", 0, 1, 9, 128), RegionLayout("b", 1, 1, 9, 256)]
    assert bytes_per_block(theirs, ranks(2, 1), 0) == 64
    assert bytes_per_block(theirs, ranks(2, 1), 1) == 128
