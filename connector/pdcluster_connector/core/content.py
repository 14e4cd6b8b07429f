"""Which cells of a rank's KV are compared with the other engine's, in terms that both engines share.

A *cell* is what one token has in one head of one layer. Both engines add up one hash for each cell that the request
wants (``worker/content.py``), keyed by the cell's place: layer, KV head of the whole model, token position. The sums
agree when the content at each place does, whatever TP, block size and order of arrival. Where a cell lies is read from
a rank's own block table here, and by nothing that plans a push (``ranges.py``): a push that goes wrong must not take
its digest along.

    decode rank: all cells of its own heads  =  sum over prefill ranks of the cells that each of them shares with it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdcluster_connector.core.ranges import Offsets, Spans
from pdcluster_connector.core.state_runs import shared_units, units_of
from pdcluster_connector.core.tp_mapping import WHOLE, Sharding, Share, plan_pushes, stripe_tokens
from pdcluster_protocol.side_channel import RankLayout, RegionLayout

DIGEST_MASK: Final = (1 << 64) - 1
"""Digests are sums modulo 2^64."""


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Cells of one region that a digest counts. ``name``: of the region, the same on both engines.

    ``rows``: of the rank's own heads; the first of them is KV head ``first_head`` of the whole model.
    """

    region: int
    name: str
    rows: range
    first_head: int
    share: Share = WHOLE
    stripe: int = 1
    run: int | None = None
    """Of a state that may be split anew: which of its runs. The rows are then the run's units."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Where the cells of some positions lie in a rank: arrays of one length."""

    positions: Offsets
    pages: Offsets
    slots: Offsets


def parts_received(decode: RankLayout, *, has_draft: bool = False) -> tuple[ContentPart, ...]:
    """All that a decode rank keeps of the model, and with ``has_draft`` of a draft model."""
    return tuple(
        part
        for index, name, region in _named(decode)
        if has_draft or not region.is_draft
        for part in _kept(index, name, region, decode)
    )


def parts_pushed(prefill: RankLayout, decode: RankLayout) -> tuple[ContentPart, ...]:
    """What a prefill rank counts for a decode rank: summed over prefill's ranks, each cell of decode's once."""
    targets = {name: region for _, name, region in _named(decode)}
    return tuple(
        part
        for index, name, region in _named(prefill)
        if name in targets
        for part in _shared(index, name, region, targets[name], prefill, decode)
    )


def other_content(here: int, pushed: int) -> str:
    """The reason for losing an attempt whose two digests differ."""
    return f"the content is not what was pushed: its digest is {here:016x} on decode, {pushed:016x} on prefill"


def cells_of(part: ContentPart, region: RegionLayout, spans: Spans, tables: Sequence[Sequence[int]]) -> Cells:
    """Where ``region`` keeps the cells of ``spans`` (per KV group) that ``part`` counts.

    ``tables``: the request's blocks of each KV group, from its first position on; of state the one block.
    """
    table = np.asarray(tables[region.group], np.int64)
    if not region.has_tokens:
        rows = np.arange(1 if part.run is None else region.runs[part.run].num_rows, dtype=np.int64)
        return Cells(rows, np.repeat(table[:1] * region.pages_per_block, len(rows)), rows)
    positions = _positions(part, region, spans)
    inside = positions % region.block_tokens
    pages = table[positions // region.block_tokens] * region.pages_per_block + inside // region.page_tokens
    return Cells(positions, pages, inside % region.page_tokens)


def _positions(part: ContentPart, region: RegionLayout, spans: Spans) -> Offsets:
    """Token by token; by whole pages where a token's content is spread over its page (vLLM's CPU kernels)."""
    whole = 1 if region.is_linear else region.page_tokens
    runs = [np.arange(start // whole * whole, -(-stop // whole) * whole) for start, stop in spans[region.group]]
    positions = np.unique(np.concatenate(runs)) if runs else np.zeros(0, np.int64)
    shared: Offsets = positions[positions // part.stripe % part.share.count == part.share.index]
    return shared


def _shared(
    index: int, name: str, region: RegionLayout, target: RegionLayout, prefill: RankLayout, decode: RankLayout
) -> Iterator[ContentPart]:
    if region.runs:
        yield from _shared_runs(index, name, region, target, prefill, decode)
        return
    if not region.has_tokens:
        if prefill.tp_rank == decode.tp_rank:
            yield ContentPart(index, name, range(1), 0)
        return
    stripe = stripe_tokens(min(region.page_tokens, target.page_tokens))
    mine = _heads_of(region, prefill)
    for push in plan_pushes(_sharding(region, prefill), _sharding(target, decode)):
        if (push.prefill_rank, push.decode_rank) == (prefill.tp_rank, decode.tp_rank):
            rows = range(push.heads.start - mine.start, push.heads.stop - mine.start)
            yield ContentPart(index, name, rows, push.heads.start, push.share, stripe)


def _kept(index: int, name: str, region: RegionLayout, rank: RankLayout) -> Iterator[ContentPart]:
    if region.runs:
        yield from (_run(index, name, n, units_of(run, rank), 0) for n, run in enumerate(region.runs))
        return
    heads = _heads_of(region, rank)
    yield ContentPart(index, name, range(len(heads)), heads.start)


def _shared_runs(
    index: int, name: str, region: RegionLayout, target: RegionLayout, prefill: RankLayout, decode: RankLayout
) -> Iterator[ContentPart]:
    for number, (ours, theirs) in enumerate(zip(region.runs, target.runs, strict=True)):
        if units := shared_units(ours, theirs, prefill, decode):
            yield _run(index, name, number, units, units.start - units_of(ours, prefill).start)


def _run(index: int, name: str, number: int, units: range, row: int) -> ContentPart:
    """``row``: of the first of ``units``, among those of the rank."""
    return ContentPart(index, f"{name} run {number}", range(row, row + len(units)), units.start, run=number)


def _sharding(region: RegionLayout, rank: RankLayout) -> Sharding:
    return Sharding(rank.tp_size, region.heads)


def _heads_of(region: RegionLayout, rank: RankLayout) -> range:
    return _sharding(region, rank).heads_of(rank.tp_rank) if region.has_tokens else range(1)


def _named(layout: RankLayout) -> Iterator[tuple[int, str, RegionLayout]]:
    """Each region with its index and a name that the other engine has too."""
    seen: Counter[str] = Counter()
    for index, region in enumerate(layout.regions):
        yield index, f"{region.layer_name}[{seen[region.layer_name]}] of group {region.group}", region
        seen[region.layer_name] += 1
