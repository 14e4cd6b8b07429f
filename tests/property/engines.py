"""Random pairs of engines for the laws of the link: shardings, stages, layouts, block sizes, prompts, block tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from hypothesis import strategies as st

from pdcluster_connector.core.ranges import NULL_BLOCK
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.core.watermark import GroupPair, KvGroup, Prompt
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout, StateRun
from property.windows import Window, windows

CELL: Final = 2
"""Bytes of one token of one head."""
NUM_BLOCKS: Final = 480

_Table: TypeAlias = tuple[tuple[int, ...], ...]
"""The blocks of one prompt in each group."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a state, as a convolution over several projections: ``units`` of each, of ``CELL`` bytes in a row.

    ``is_by_row``: each row has all projections side by side (layout SD); else each projection has its rows in a run.
    """

    units: tuple[int, ...]
    num_rows: int
    is_by_row: bool

    def runs(self, sharding: Callable[[int], int], offset: int) -> list[StateRun]:
        """``sharding``: units of which a rank has how many."""
        lengths = [sharding(units) * CELL for units in self.units]
        made = []
        for units, length in zip(self.units, lengths, strict=True):
            if self.is_by_row:
                made.append(StateRun(units, offset, self.num_rows, sum(lengths), length))
                offset += length
            else:
                made.append(StateRun(units, offset, 1, 0, length * self.num_rows))
                offset += length * self.num_rows
        return made

    def num_bytes(self, sharding: Callable[[int], int]) -> int:
        return sum(sharding(units) for units in self.units) * CELL * self.num_rows


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model. ``heads``: 0 for a latent, -1 for state. ``is_draft``: a draft's, on decode alone.

    ``parts``: of state whose split is known.
    """

    name: str
    group: int
    heads: int
    is_draft: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def kind(self) -> RegionKind:
        return {0: RegionKind.LATENT, -1: RegionKind.STATE}.get(self.heads, RegionKind.HEADS)


@dataclass(frozen=True, slots=True)
class Engine:
    """How one engine holds the model: TP, stages, tokens in a block and in a page of each group, padding."""

    tp_size: int
    num_stages: int
    block_tokens: tuple[int, ...]
    page_tokens: tuple[int, ...]
    padding: int
    window_step: tuple[int, ...]
    """Of each group, as ``RegionLayout`` has it."""

    def ranks(self, layers: tuple[Layer, ...]) -> list[RankLayout]:
        """All ranks, stage by stage; each region of a rank begins where the one before it ends."""
        return [
            RankLayout(rank, self.tp_size, tuple(self._regions(rank, stage, layers)), stage, self.num_stages)
            for stage, rank in product(range(self.num_stages), range(self.tp_size))
        ]

    def _regions(self, rank: int, stage: int, layers: tuple[Layer, ...]) -> list[RegionLayout]:
        regions: list[RegionLayout] = []
        for number, layer in enumerate(layers):
            if number * self.num_stages // len(layers) == stage:
                base = regions[-1].base + NUM_BLOCKS * regions[-1].block_stride if regions else 0
                regions.append(self._region(rank, layer, base))
        return regions

    def _region(self, rank: int, layer: Layer, base: int) -> RegionLayout:
        heads = max(layer.heads, 1)
        if layer.kind is RegionKind.STATE:
            runs = self._runs(layer)
            size = sum(part.num_bytes(self._held) for part in layer.parts) or 9
            place = layer.name, layer.group, base, NUM_BLOCKS, size + self.padding, size
            return RegionLayout(*place, layer.kind, 1, 1, runs=runs)
        tokens, block = self.page_tokens[layer.group], self.block_tokens[layer.group]
        size = tokens * CELL * len(Sharding(self.tp_size, heads).heads_of(rank))
        stride = size + self.padding
        place = layer.name, layer.group, base, NUM_BLOCKS, stride, size
        step = self.window_step[layer.group]
        kept = heads, tokens, block // tokens
        return RegionLayout(*place, layer.kind, *kept, window_step=step, is_draft=layer.is_draft)

    def _runs(self, layer: Layer) -> tuple[StateRun, ...]:
        made: list[StateRun] = []
        for number, part in enumerate(layer.parts):
            made += part.runs(self._held, sum(before.num_bytes(self._held) for before in layer.parts[:number]))
        return tuple(made)

    def _held(self, units: int) -> int:
        return len(Sharding(self.tp_size, units).heads_of(0))


@dataclass(frozen=True, slots=True)
class Scene:
    """One prompt on two engines. Block tables are those of every rank alike; 0 is the null block."""

    layers: tuple[Layer, ...]
    prefill: Engine
    decode: Engine
    groups: tuple[GroupPair, ...]
    prompt: Prompt
    prefill_table: tuple[tuple[int, ...], ...]
    decode_table: tuple[tuple[int, ...], ...]
    chunks: tuple[int, ...]
    """Tokens computed after each step; the last one is the whole prompt."""

    @property
    def pushed(self) -> tuple[Layer, ...]:
        """Prefill's layers."""
        return tuple(layer for layer in self.layers if not layer.is_draft)

    @property
    def has_state(self) -> bool:
        return any(layer.kind is RegionKind.STATE for layer in self.layers)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        return tuple(sorted({max(layer.heads, 1) for layer in self.pushed if layer.heads >= 0}))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Anything that two engines of one model can be."""
    has_state = draw(st.booleans())
    layers = draw(_layers(has_state=has_state))
    heads = {max(layer.heads, 1) for layer in layers}
    heads |= {units for layer in layers for part in layer.parts for units in part.units}
    legal = [tp for tp in (1, 2, 3, 4, 6, 8) if all(h % tp == 0 or tp % h == 0 for h in heads)]
    tps = st.sampled_from(legal)
    prefill_tp = draw(tps)
    is_opaque = any(layer.kind is RegionKind.STATE and not layer.parts for layer in layers)
    decode_tp = prefill_tp if is_opaque else draw(tps)
    num_groups = 1 + max(layer.group for layer in layers)
    state_groups = {layer.group for layer in layers if layer.heads == -1}
    sizes = [draw(_block_sizes()) for _ in range(num_groups)]
    seen = [None if g in state_groups else draw(windows(*(s[0] for s in size))) for g, size in enumerate(sizes)]
    engines = [
        Engine(
            tp,
            draw(st.integers(1, min(3, len(layers)))),
            tuple(size[side][0] for size in sizes),
            tuple(size[side][1] for size in sizes),
            draw(st.integers(0, 5)),
            tuple(window.step if window else 0 for window in seen),
        )
        for side, tp in enumerate((prefill_tp, decode_tp))
    ]
    kv_groups = [
        [KvGroup(1, is_state=True) if g in state_groups else KvGroup(engine.block_tokens[g]) for g in range(num_groups)]
        for engine in engines
    ]
    pairs = tuple(GroupPair(p, d) for p, d in zip(*kv_groups, strict=True))
    num_tokens = draw(st.integers(1, 600))
    common = int(np.lcm.reduce([group.block_tokens for group in kv_groups[1]]))
    cached = draw(st.integers(0, (num_tokens - 1) // common)) * common
    prompt = Prompt(num_tokens, cached, pairs)
    chunks = (*sorted(draw(st.lists(st.integers(1, num_tokens), max_size=3))), num_tokens)
    tables = [draw(_tables(group, num_tokens)) for group in kv_groups]
    kept = draw(_kept(tables[0], pairs, seen, num_tokens)), draw(_wanted(tables[1], pairs, seen, num_tokens))
    return Scene(layers, engines[0], engines[1], pairs, prompt, *kept, chunks)


@st.composite
def _layers(draw: st.DrawFn, *, has_state: bool) -> tuple[Layer, ...]:
    """The model's layers, and maybe those of a draft model, which has heads of its own: on both, or on decode alone."""
    num_heads, num_draft_heads = draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8])), draw(st.sampled_from([1, 2, 4, 6, 8]))
    heads = [num_heads] * draw(st.integers(1, 4))
    first, is_alone = len(heads), draw(st.booleans())
    heads += [num_draft_heads] * draw(st.integers(0, 2))
    layers = [
        Layer(f"a{n}", draw(st.integers(0, 1)) if n else 0, count, is_draft=is_alone and n >= first)
        for n, count in enumerate(heads)
    ]
    group = 1 + max(layer.group for layer in layers)
    parts = draw(_parts())
    return (*layers, *(Layer(f"s{n}", group, -1, parts=parts) for n in range(2 if has_state else 0)))


@st.composite
def _parts(draw: st.DrawFn) -> tuple[Part, ...]:
    """None where the split is not known; else a convolution, whose groups may be on every rank, and a state."""
    if not draw(st.integers(0, 3)):
        return ()
    groups = draw(st.sampled_from([1, 4, 8]))
    projections = draw(st.sampled_from([(8,), (8, groups, groups), (groups, groups, 8)]))
    return Part(projections, draw(st.integers(1, 4)), draw(st.booleans())), Part((8,), 1, is_by_row=True)


@st.composite
def _block_sizes(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int]]:
    """(block, page) in tokens of one group, for prefill and for decode."""
    page, *others = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    base = 4 * page
    return (base * others[0], base // others[2]), (base * others[1], base)


@st.composite
def _tables(draw: st.DrawFn, groups: list[KvGroup], num_tokens: int) -> _Table:
    """Blocks of each group, none twice: groups share memory."""
    wanted = [1 if group.is_state else -(-num_tokens // group.block_tokens) for group in groups]
    order = draw(st.randoms(use_true_random=False)).sample(range(1, 1 + sum(wanted) + 5), sum(wanted))
    if draw(st.booleans()):
        order.sort()
    return tuple(tuple(order[sum(wanted[:g]) : sum(wanted[: g + 1])]) for g in range(len(groups)))


@st.composite
def _kept(
    draw: st.DrawFn, table: _Table, groups: tuple[GroupPair, ...], seen: Sequence[Window | None], num_tokens: int
) -> _Table:
    """Prefill's blocks at its last step: what lay before its window was recycled, or never taken out of its cache."""
    computed = draw(st.integers(0, num_tokens - 1))
    return tuple(
        window.kept(computed, blocks, pair.prefill.block_tokens) if window else blocks
        for blocks, pair, window in zip(table, groups, seen, strict=True)
    )


@st.composite
def _wanted(
    draw: st.DrawFn, table: _Table, groups: tuple[GroupPair, ...], seen: Sequence[Window | None], num_tokens: int
) -> _Table:
    """Decode's blocks: those before its window are null; any leading ones, where there is no window."""
    tables = []
    for blocks, pair, window in zip(table, groups, seen, strict=True):
        if window:
            tables.append(window.kept(num_tokens, blocks, pair.decode.block_tokens))
            continue
        out = 0 if pair.decode.is_state else draw(st.integers(0, len(blocks) - 1))
        tables.append((NULL_BLOCK,) * out + blocks[out:] if draw(st.booleans()) else blocks)
    return tuple(tables)
