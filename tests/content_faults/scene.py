"""One request on two engines of given TP sizes: what each rank's memory holds, and what its sums are.

The memory is filled by logical place: no plan of a push takes part, nor the table by which content is read for sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from pdcluster_connector.core.sending import Push, PushKey
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.core.writers import Debt
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.content_sums import KvReader
from pdcluster_connector.worker.pushes import LivePush
from pdcluster_connector.worker.route import Route, plan_route
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.side_channel import ContentSums, Hello, RankLayout, RegionKind, RegionLayout, Welcome

Bytes = npt.NDArray[np.uint8]

NUM_TOKENS, CACHED, PAGE = 600, 32, 16
PREFILL_BLOCK, DECODE_BLOCK = 32, 16
HEADS: Final = 4
CELL: Final = 32
BOOT: Final = BootId("d")
KV: Final = KvFingerprint("m", "f", "LBHNC", (1, HEADS), "none", "0", "0")


@dataclass(frozen=True)
class Layer:
    """One layer of the model. ``is_linear``: as of ``RegionLayout``."""

    name: str
    kind: RegionKind
    is_linear: bool = True

    @property
    def heads(self) -> int:
        return HEADS if self.kind in (RegionKind.HEADS, RegionKind.TOKENS) else 1

    @property
    def group(self) -> int:
        return int(self.kind is RegionKind.STATE)


def layers_for(*, has_state: bool) -> tuple[Layer, ...]:
    """GQA, a layer of it as vLLM's CPU kernels keep it, MLA, GQA with tokens first, which unequal TP sizes reshard, and
    state where both engines have one TP."""
    heads = [Layer("heads.0", RegionKind.HEADS), Layer("heads.1", RegionKind.HEADS, is_linear=False)]
    others = [
        Layer("heads.2", RegionKind.HEADS),
        Layer("latent", RegionKind.LATENT),
        Layer("tokens", RegionKind.TOKENS),
    ]
    return (*heads, *others, *([Layer("state", RegionKind.STATE)] if has_state else []))


@dataclass
class Rank:
    """One rank of an engine, and its memory."""

    layout: RankLayout
    memory: torch.Tensor
    tables: tuple[tuple[int, ...], ...]
    reader: KvReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = KvReader(self.layout, [_view(self.memory, region) for region in self.layout.regions])

    def blocks(self, region: RegionLayout) -> Bytes:
        """[blocks, bytes], of this memory."""
        whole = self.memory.numpy()[region.base : region.base + region.num_blocks * region.block_stride]
        return whole.reshape(region.num_blocks, region.block_stride)

    def order(self, check: ContentCheck, targets: tuple[tuple[int, ...], ...] = ()) -> ContentOrder:
        spans = (((CACHED, NUM_TOKENS),), ((0, 1),))[: len(self.tables)]
        return ContentOrder(spans, self.tables, check, targets)


@dataclass
class Scene:
    """Both engines after a push that went well. Sums of prefill are made once for each transfer."""

    prefill_tp: int
    decode_tp: int
    seed: int
    prefill: list[Rank] = field(init=False)
    decode: list[Rank] = field(init=False)
    _sums: dict[tuple[ContentCheck, str, int], list[ContentSums]] = field(default_factory=dict)
    _routes: dict[int, list[tuple[Route, LivePush]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dice = np.random.default_rng(self.seed)
        self.layers = layers_for(has_state=self.prefill_tp == self.decode_tp)
        content = {layer.name: _content(layer, self.prefill_tp, dice) for layer in self.layers}
        self.prefill = self._ranks(self.prefill_tp, PREFILL_BLOCK, content, dice)
        self.decode = self._ranks(self.decode_tp, DECODE_BLOCK, content, dice)

    def pushed(self, check: ContentCheck, key: str, decode: int) -> list[ContentSums]:
        """What each prefill rank says to one decode rank."""
        known = (check, key, decode)
        if known not in self._sums:
            to = self.decode[decode].layout
            self._sums[known] = [rank.reader.pushed(to, rank.order(check), key).result() for rank in self.prefill]
        return self._sums[known]

    def routes(self, decode: int) -> list[tuple[Route, LivePush]]:
        """Of each prefill rank to one decode rank, with a push that decode has compared."""
        if decode not in self._routes:
            self._routes[decode] = self._planned(decode)
        for _, live in self._routes[decode]:
            live.layers.clear()
        return self._routes[decode]

    def _planned(self, decode: int) -> list[tuple[Route, LivePush]]:
        rank, found = self.decode[decode], []
        welcome = Welcome(EngineId("d"), BOOT, "", rank.layout)
        for prefill in self.prefill:
            hello = Hello(EngineId("p"), BootId("p"), prefill.layout, KV)
            push = Push(PushKey(TransferId("t"), Attempt(1)), hold_s=1.0, deadline=9.0)
            live = LivePush(push, RequestId("r"), "", NUM_TOKENS, 0.0)
            live.content = prefill.order(ContentCheck.FULL, rank.tables)
            found.append((plan_route(welcome, BOOT, hello, can_reshard=True), live))
        return found

    def debt(self) -> Debt:
        every = frozenset(range(self.prefill_tp))
        return Debt(1, Fraction(1, self.prefill_tp), Fraction(1), every)

    def _ranks(self, tp_size: int, block: int, content: dict[str, Bytes], dice: np.random.Generator) -> list[Rank]:
        num_blocks = 2 * (-(-NUM_TOKENS // block)) + 4
        order = dice.permutation(np.arange(1, num_blocks))
        needed = -(-NUM_TOKENS // block)
        tables = [tuple(order[:needed].tolist())] + [(int(order[-1]),)] * (self.layers[-1].kind is RegionKind.STATE)
        ranks = []
        for tp_rank in range(tp_size):
            layout = RankLayout(tp_rank, tp_size, tuple(_regions(self.layers, tp_rank, tp_size, block, num_blocks)))
            last = layout.regions[-1]
            size = last.base + last.num_blocks * last.block_stride
            memory = torch.from_numpy(dice.integers(0, 256, size, np.uint8))
            rank = Rank(layout, memory, tuple(tables))
            for layer, region in zip(self.layers, layout.regions, strict=True):
                _fill(rank, layer, region, content[layer.name])
            ranks.append(rank)
        return ranks


def _content(layer: Layer, tp_size: int, dice: np.random.Generator) -> Bytes:
    """[heads or ranks, tokens, bytes]."""
    if layer.kind is RegionKind.STATE:
        return dice.integers(0, 256, (tp_size, 1, 3 * CELL + 4), np.uint8)
    return dice.integers(0, 256, (layer.heads, -(-NUM_TOKENS // PAGE) * PAGE, CELL), np.uint8)


def _regions(layers: tuple[Layer, ...], tp_rank: int, tp_size: int, block: int, num_blocks: int) -> list[RegionLayout]:
    found: list[RegionLayout] = []
    for layer in layers:
        base = found[-1].base + found[-1].num_blocks * found[-1].block_stride if found else 0
        if layer.kind is RegionKind.STATE:
            size = 3 * CELL + 4
            found.append(RegionLayout(layer.name, 1, base, num_blocks, size, size, layer.kind, 1, 1))
            continue
        size = PAGE * CELL * len(Sharding(tp_size, layer.heads).heads_of(tp_rank))
        where = layer.name, 0, base, num_blocks, size, size, layer.kind, layer.heads
        found.append(RegionLayout(*where, PAGE, block // PAGE, is_linear=layer.is_linear))
    return found


def _fill(rank: Rank, layer: Layer, region: RegionLayout, content: Bytes) -> None:
    blocks, table = rank.blocks(region), rank.tables[region.group]
    if layer.kind is RegionKind.STATE:
        blocks[table[0]] = content[rank.layout.tp_rank, 0]
        return
    heads = Sharding(rank.layout.tp_size, layer.heads).heads_of(rank.layout.tp_rank)
    cells = by_heads(blocks.reshape(region.num_blocks, -1, region.page_bytes), region)
    for first in range(0, content.shape[1], PAGE):
        block, page = table[first // region.block_tokens], first % region.block_tokens // PAGE
        cells[block, page] = content[heads.start : heads.stop, first : first + PAGE]


def by_heads(pages: Bytes, region: RegionLayout) -> Bytes:
    """Pages ``[..., bytes]`` as ``[..., heads, tokens, bytes of a cell]``, the same memory."""
    if region.kind is RegionKind.TOKENS:
        return pages.reshape(*pages.shape[:-1], PAGE, -1, CELL).swapaxes(-2, -3)
    return pages.reshape(*pages.shape[:-1], -1, PAGE, CELL)


def _view(memory: torch.Tensor, region: RegionLayout) -> torch.Tensor:
    pages = region.num_blocks * region.pages_per_block
    whole = memory[region.base : region.base + pages * region.page_stride]
    if region.kind is RegionKind.STATE:
        return whole.view(pages, 1, 1, region.page_bytes)
    return torch.from_numpy(by_heads(whole.view(pages, region.page_bytes).numpy(), region))
