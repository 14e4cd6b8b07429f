"""The law of the link: whatever the two engines are, each decode rank gets each of its bytes exactly once."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, product
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_connector.core.link import Link, full_coverage, owed_by, plan_link
from pdcluster_connector.core.ranges import NULL_BLOCK, GroupSlice, plan_ranges
from pdcluster_connector.core.tp_mapping import Sharding, related_ranks
from pdcluster_connector.core.watermark import KvGroup, slice_of, wanted_spans
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout, StateRun
from property.engines import CELL, Scene, scenes
from property.windows import Window

Bytes: TypeAlias = npt.NDArray[np.int64]
EMPTY = -1


def size_of(rank: RankLayout) -> int:
    return max((r.base + r.num_blocks * r.block_stride for r in rank.regions), default=0)


def cells(region: RegionLayout, rank: RankLayout, table: tuple[int, ...], tokens: Bytes) -> tuple[Bytes, Bytes]:
    """(addresses, values) of every byte that ``tokens`` have in this region; the value names the byte in the model."""
    name = sum(ord(c) * 31**i for i, c in enumerate(region.layer_name)) * 1_000_000_000
    if region.runs:
        parts = [unit_cells(run, number, rank) for number, run in enumerate(region.runs)]
        begin = region.base + table[0] * region.block_stride
        return begin + np.concatenate([a for a, _ in parts]), name + np.concatenate([v for _, v in parts])
    if region.kind is RegionKind.STATE:
        inside = np.arange(region.page_bytes)
        return region.base + table[0] * region.block_stride + inside, name + rank.tp_rank * 100 + inside
    heads = Sharding(rank.tp_size, region.heads).heads_of(rank.tp_rank)
    blocks = np.asarray(table)[tokens // region.block_tokens]
    inside = tokens % region.block_tokens
    page = region.base + blocks * region.block_stride + inside // region.page_tokens * region.page_stride
    token = inside % region.page_tokens
    spots = [
        (page + (local * region.page_tokens + token) * CELL + byte, name + (tokens * 10 + head) * CELL + byte)
        for local, head in enumerate(heads)
        for byte in range(CELL)
    ]
    return np.concatenate([a for a, _ in spots]), np.concatenate([v for _, v in spots])


def unit_cells(run: StateRun, number: int, rank: RankLayout) -> tuple[Bytes, Bytes]:
    """(offsets in the page, values) of every byte of a state's run; the value names run, row, unit and byte."""
    units = Sharding(rank.tp_size, run.units).heads_of(rank.tp_rank)
    size = run.row_bytes // len(units)
    row, local, byte = (axis.ravel() for axis in np.indices((run.num_rows, len(units), size)))
    offsets = run.offset + row * run.row_stride + local * size + byte
    return offsets, ((number * 10 + row) * 1000 + local + units.start) * 100 + byte


def filled(rank: RankLayout, scene: Scene) -> Bytes:
    """A prefill rank's memory once the prompt is computed."""
    memory = np.full(size_of(rank), EMPTY, np.int64)
    for region in rank.regions:
        table = scene.prefill_table[region.group]
        spots, values = cells(region, rank, table, held(region, table, scene.prompt.num_tokens))
        memory[spots] = values
    return memory


def held(region: RegionLayout, table: tuple[int, ...], num_tokens: int) -> Bytes:
    """Positions that are not in a null block. Of state: any."""
    tokens = np.arange(num_tokens)
    if region.kind is RegionKind.STATE:
        return tokens
    kept: Bytes = tokens[np.asarray(table)[tokens // region.block_tokens] != NULL_BLOCK]
    return kept


def slices(scene: Scene) -> list[tuple[GroupSlice, ...]]:
    """What each step pushes, as the scheduler decides it."""
    marks, made = [0] * len(scene.groups), []
    for computed in scene.chunks:
        spans = [scene.prompt.next_span(number, mark, computed) for number, mark in enumerate(marks)]
        marks = [stop for _, stop in spans]
        made.append(tuple(map(slice_of, scene.groups, spans, scene.prefill_table, scene.decode_table)))
    return made


def push(link: Link, steps: list[tuple[GroupSlice, ...]], source: Bytes, target: Bytes, written: Bytes) -> int:
    """Apply every range of the link; the number of bytes that were written."""
    total = 0
    for part, copy in product(steps, link.copies):
        shape = link.shapes[copy.shape]
        ranges = plan_ranges(shape, part[shape.group])
        for start, to, length in zip(ranges.source, ranges.target, ranges.num_bytes, strict=True):
            ours, theirs = copy.source_base + int(start), copy.target_base + int(to)
            target[theirs : theirs + length] = source[ours : ours + length]
            written[theirs : theirs + length] += 1
        total += ranges.total_bytes
    return total


def wanted(group: KvGroup, scene: Scene, table: tuple[int, ...]) -> Bytes:
    """Positions that decode must have of one group."""
    spans = wanted_spans(group, scene.prompt.cached_tokens, scene.prompt.num_tokens, table)
    return np.concatenate([np.arange(*span) for span in spans] or [np.empty(0, np.int64)])


@settings(max_examples=drawn(150))
@given(scenes())
def test_every_decode_rank_gets_each_of_its_bytes_exactly_once(scene: Scene) -> None:
    prefills, steps = scene.prefill.ranks(scene.pushed), slices(scene)
    spans = tuple(
        wanted_spans(pair.decode, scene.prompt.cached_tokens, scene.prompt.num_tokens, table)
        for pair, table in zip(scene.groups, scene.decode_table, strict=True)
    )
    sources = [filled(rank, scene) for rank in prefills]
    for rank in scene.decode.ranks(scene.layers):
        decode = owed_by(prefills[0], rank)
        assert [region for region in rank.regions if region not in decode.regions] == drafts_of(rank)
        target = np.full(size_of(rank), EMPTY, np.int64)
        written = np.zeros(len(target), np.int64)
        coverage = Fraction(0)
        for prefill, source in zip(prefills, sources, strict=True):
            link = plan_link(prefill, rank)
            assert push(link, steps, source, target, written) == link.owed_bytes(spans)
            coverage += link.coverage
        assert coverage == full_coverage(decode)
        assert written.max(initial=0) <= 1
        for region in decode.regions:
            table = scene.decode_table[region.group]
            tokens = wanted(scene.groups[region.group].decode, scene, table)
            spots, values = cells(region, decode, table, tokens)
            assert np.array_equal(target[spots], values)
        for region in drafts_of(rank):
            assert not written[region.base : region.base + region.span_bytes].any()


def drafts_of(rank: RankLayout) -> list[RegionLayout]:
    """The layers of a draft model, which prefill does not have: nothing of them is owed or written."""
    return [region for region in rank.regions if region.is_draft]


@settings(max_examples=drawn(150))
@given(scenes())
def test_nothing_is_written_outside_of_the_blocks_that_decode_reserved(scene: Scene) -> None:
    prefills, steps = scene.prefill.ranks(scene.pushed), slices(scene)
    for decode in scene.decode.ranks(scene.layers):
        allowed = np.zeros(size_of(decode), bool)
        for region in decode.regions:
            first = 0 if region.kind is RegionKind.STATE else scene.prompt.cached_tokens // region.block_tokens
            for block in scene.decode_table[region.group][first:]:
                if block:
                    start = region.base + block * region.block_stride
                    allowed[start : start + region.block_stride] = True
        written = np.zeros(len(allowed), np.int64)
        for prefill in prefills:
            source = np.zeros(size_of(prefill), np.int64)
            push(plan_link(prefill, decode), steps, source, np.zeros(len(allowed), np.int64), written)
        assert not written[~allowed].any()


@given(scenes())
def test_ranks_that_share_bytes_are_related_whatever_their_stages(scene: Scene) -> None:
    """Both ends work out from TP sizes and head counts alone who speaks to whom."""
    related = related_ranks(scene.prefill.tp_size, scene.decode.tp_size, scene.kv_heads, has_state=scene.has_state)
    prefills, decodes = scene.prefill.ranks(scene.pushed), scene.decode.ranks(scene.layers)
    for prefill, decode in product(prefills, decodes):
        if plan_link(prefill, decode).copies:
            assert (prefill.tp_rank, decode.tp_rank) in related


@given(scenes())
def test_ranges_that_follow_each_other_on_both_sides_are_one(scene: Scene) -> None:
    prefills, decodes = scene.prefill.ranks(scene.pushed), scene.decode.ranks(scene.layers)
    for prefill, decode, part in product(prefills, decodes, slices(scene)):
        for shape in plan_link(prefill, decode).shapes:
            ranges = plan_ranges(shape, part[shape.group])
            rows = zip(ranges.source.tolist(), ranges.target.tolist(), ranges.num_bytes.tolist(), strict=True)
            assert all((a + n, b + n) != (c, d) for (a, b, n), (c, d, _) in pairwise(rows))


@given(sizes=st.tuples(*[st.sampled_from([4, 8, 16, 32])] * 2), tokens=st.integers(1, 100), is_chunked=st.booleans())
def test_a_window_is_refused_exactly_where_prefill_lacks_a_token_of_some_prompt(
    sizes: tuple[int, int], tokens: int, is_chunked: bool
) -> None:
    window = Window(tokens, is_chunked)
    ours, theirs = (
        RankLayout(0, 1, (RegionLayout("a", 0, 0, 9, 4 * CELL, 4 * CELL, page_tokens=4, pages_per_block=size // 4),))
        for size in sizes
    )
    ours = msgspec.structs.replace(ours, regions=(msgspec.structs.replace(ours.regions[0], window_step=window.step),))
    assert is_refused(ours, theirs) == window.may_lack(*sizes)


def is_refused(prefill: RankLayout, decode: RankLayout) -> bool:
    try:
        plan_link(prefill, decode)
    except ProtocolError as refused:
        assert "a window, in blocks of" in str(refused)  # noqa: PT017
        return True
    return False
