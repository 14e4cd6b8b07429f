"""Resharded KV that goes straight from its blocks: the ranks' strips together are what decode's ranks must hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from drawn import drawn
from fakes.token_major import Pages, Wanted, prefill_memory, shape_of
from pdcluster_connector.core.link import plan_direct_shapes, plan_link
from pdcluster_connector.core.ranges import GroupSlice, plan_ranges
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.reshard.feeds import TokenPages
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout
from property.test_resharding import NUM_BLOCKS, Case, cases, decode_ranks


def layout(tp_size: int, rank: int, kv_heads: int, cell_bytes: int, pages: TokenPages) -> RankLayout:
    """One region."""
    page_bytes = pages.page_tokens * len(Sharding(tp_size, kv_heads).heads_of(rank)) * cell_bytes
    kind = (RegionKind.TOKENS, kv_heads, pages.page_tokens, pages.pages_per_block)
    return RankLayout(rank, tp_size, (RegionLayout("k", 0, 0, NUM_BLOCKS, pages.page_stride, page_bytes, *kind),))


def as_layouts_have_it(case: Case) -> Case:
    """A layout knows padded pages, and no padded blocks."""

    def unpadded(pages: Pages) -> Pages:
        return pages if pages.pages_per_block == 1 else replace(pages, padding=0)

    ours = case.shapes[0].pages
    prefill = Pages(ours.page_tokens, ours.pages_per_block)
    kv_heads = case.shapes[0].kv_heads
    shapes = tuple(shape_of(prefill, case.prefill_tp, kv_heads, shape.cell_bytes) for shape in case.shapes)
    wanted = tuple(tuple(replace(w, decode=unpadded(w.decode)) for w in of_region) for of_region in case.wanted)
    return replace(case, shapes=shapes, wanted=wanted)


def in_blocks(pages: TokenPages) -> TokenPages:
    """One page a block, with the padding of both behind it."""
    return replace(pages, page_stride=pages.block_stride) if pages.pages_per_block == 1 else pages


def slice_of(want: Wanted) -> GroupSlice:
    item = want.item
    return GroupSlice(item.start, item.stop, item.prefill_blocks, item.decode_blocks)


@settings(max_examples=drawn(150), deadline=None)
@given(cases())
def test_the_strips_of_all_ranks_bring_each_byte_once_and_need_no_other_rank(drawn_case: Case) -> None:
    case = as_layouts_have_it(drawn_case)
    for index, shape in enumerate(case.shapes):
        wanted, kv_heads, tp_size = case.wanted[index], shape.kv_heads, case.prefill_tp
        regions = [prefill_memory(rank, tp_size, shape, wanted, NUM_BLOCKS) for rank in range(tp_size)]
        ours = [layout(tp_size, rank, kv_heads, shape.cell_bytes, in_blocks(shape.pages)) for rank in range(tp_size)]
        for (decode_tp, pages, rank), decode in decode_ranks(case, index).items():
            to = layout(decode_tp, rank, kv_heads, shape.cell_bytes, in_blocks(decode.pages))
            theirs = [want for want in wanted if (want.item.decode_tp_size, want.decode) == (decode_tp, pages)]
            for prefill, region in zip(ours, regions, strict=True):
                for strip in plan_direct_shapes(plan_link(prefill, to), prefill, to).values():
                    for want in theirs:
                        ranges = plan_ranges(strip, slice_of(want))
                        rows = zip(ranges.source, ranges.target, ranges.num_bytes, strict=True)
                        for source, target, size in rows:
                            decode.data[target : target + size] = region[source : source + size]
                            decode.writes[target : target + size] += 1
            data, writes = decode.expected(theirs, kv_heads)
            assert np.array_equal(decode.writes, writes)
            assert np.array_equal(decode.data, data)
