"""Token-major KV caches as numpy memory, filled by hand: the reference that the resharder is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pdcluster_connector.core.ranges import NULL_BLOCK
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.reshard.feeds import ReshardItem, TokenPages, TokenShape
from pdcluster_connector.reshard.rounds import StagedPart, write_rows

Bytes: TypeAlias = npt.NDArray[np.uint8]

UNWRITTEN = 0xEE
SPARE_BLOCKS = 2


@dataclass(frozen=True)
class Pages:
    """Pages of either engine, but for the number of heads of a rank. ``padding``: bytes after each page and block."""

    page_tokens: int
    pages_per_block: int = 1
    padding: int = 0

    @property
    def block_tokens(self) -> int:
        return self.page_tokens * self.pages_per_block

    def of(self, num_heads: int, cell_bytes: int) -> TokenPages:
        page = self.page_tokens * num_heads * cell_bytes + self.padding
        block = page * self.pages_per_block + self.padding
        return TokenPages(self.page_tokens, self.pages_per_block, num_heads * cell_bytes, page, block)


def shape_of(pages: Pages, tp_size: int, kv_heads: int, cell_bytes: int) -> TokenShape:
    return TokenShape(kv_heads, cell_bytes, pages.of(len(Sharding(tp_size, kv_heads).heads_of(0)), cell_bytes))


def random_cells(seed: int, tokens: int, kv_heads: int, cell_bytes: int) -> Bytes:
    """[token, head, byte]: what the model has computed for one request in one region."""
    return np.random.default_rng(seed).integers(0, 256, (tokens, kv_heads, cell_bytes), np.uint8)


def memory(pages: TokenPages, num_blocks: int, fill: int = 0x55) -> Bytes:
    return np.full(num_blocks * pages.block_stride, fill, np.uint8)


def put(target: Bytes, pages: TokenPages, blocks: Sequence[int], first: int, cells: Bytes) -> None:
    """Write ``cells`` [token, head, byte] of positions ``first..`` token by token; the null block is left out."""
    for number, cell in enumerate(cells):
        token = first + number
        block = blocks[token // pages.block_tokens - first // pages.block_tokens]
        if block == NULL_BLOCK:
            continue
        page, inside = divmod(token % pages.block_tokens, pages.page_tokens)
        offset = block * pages.block_stride + page * pages.page_stride + inside * pages.token_bytes
        target[offset : offset + pages.token_bytes] = cell.ravel()


def rounded_stop(item: ReshardItem, prefill: Pages) -> int:
    unit = min(prefill.block_tokens, item.decode_block_tokens)
    return -(-item.stop // unit) * unit


def blocks_for(random: np.random.Generator, num_requests: int, each: int) -> list[list[int]]:
    """Disjoint blocks in any order; never the null block."""
    numbers = random.permutation(np.arange(1, num_requests * each + 1 + SPARE_BLOCKS))
    return [numbers[index * each : (index + 1) * each].tolist() for index in range(num_requests)]


@dataclass(frozen=True)
class Wanted:
    """One item, the cells of its tokens, and decode's pages."""

    item: ReshardItem
    cells: Bytes
    decode: Pages


def prefill_memory(rank: int, tp_size: int, shape: TokenShape, wanted: Sequence[Wanted], num_blocks: int) -> Bytes:
    """The rank's region, as the forward pass leaves it."""
    region = memory(shape.pages, num_blocks)
    heads = Sharding(tp_size, shape.kv_heads).heads_of(rank)
    for want in wanted:
        cells = np.ascontiguousarray(want.cells[:, heads.start : heads.stop])
        put(region, shape.pages, want.item.prefill_blocks, want.item.start, cells)
    return region


@dataclass
class DecodeRank:
    """One region of a decode rank, which the rows of parts are written into."""

    tp_size: int
    rank: int
    pages: TokenPages
    data: Bytes
    writes: Bytes
    """How often each byte was written."""

    @classmethod
    def empty(cls, want: Wanted, shape: TokenShape, rank: int, num_blocks: int) -> DecodeRank:
        tp_size = want.item.decode_tp_size
        heads = Sharding(tp_size, shape.kv_heads).heads_of(rank)
        pages = want.decode.of(len(heads), shape.cell_bytes)
        data = memory(pages, num_blocks, UNWRITTEN)
        return cls(tp_size, rank, pages, data, np.zeros_like(data))

    def write(self, part: StagedPart, item: ReshardItem, buffer: Bytes) -> int:
        """Write the part from ``buffer``; how many ranges it took."""
        rows = write_rows(part, item, self.pages)
        assert rows.total_bytes == part.num_bytes
        for source, target, num_bytes in zip(rows.source, rows.target, rows.num_bytes, strict=True):
            self.data[target : target + num_bytes] = buffer[source : source + num_bytes]
            self.writes[target : target + num_bytes] += 1
        return len(rows.source)

    def expected(self, wanted: Sequence[Wanted], kv_heads: int) -> tuple[Bytes, Bytes]:
        """What must be in memory, and how often each byte must have been written."""
        heads = Sharding(self.tp_size, kv_heads).heads_of(self.rank)
        data, writes = np.full_like(self.data, UNWRITTEN), np.zeros_like(self.data)
        for want in wanted:
            if want.item.decode_tp_size == self.tp_size:
                cells = np.ascontiguousarray(want.cells[:, heads.start : heads.stop])
                put(data, self.pages, want.item.decode_blocks, want.item.start, cells)
                put(writes, self.pages, want.item.decode_blocks, want.item.start, np.ones_like(cells))
        return data, writes


def with_null_prefix(item: ReshardItem, num_blocks: int) -> ReshardItem:
    """Decode does not want what is in its first ``num_blocks`` blocks."""
    kept = list(item.decode_blocks)[num_blocks:]
    return replace(item, decode_blocks=[NULL_BLOCK] * min(num_blocks, len(item.decode_blocks)) + kept)
