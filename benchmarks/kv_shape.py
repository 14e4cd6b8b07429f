"""KV memory as the rank benchmarks use it: sizes, and the ranges that a plain user of a transport would write. Pure.

A rank holds its layers one after the other, each as head-major blocks:

    layer l, block b:  (l * num_blocks + b) * block_bytes   [ head 0 | head 1 | ... ]

The references write the ranges that this file works out. It takes nothing from the connector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Range(NamedTuple):
    """Bytes ``source .. source + num_bytes`` of one rank's memory go to ``target`` in another's."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TpRank:
    """One rank of an engine of ``size`` ranks."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV cache of a model. ``block_size``: tokens. By default 64 KiB a token, a usual figure for served models."""

    block_size: int
    num_blocks: int
    num_layers: int = 16
    kv_heads: int = 8
    head_bytes: int = 512
    """K and V of one token and head: 2 * 128 * 2 bytes."""

    def block_bytes(self, tp_size: int) -> int:
        """Bytes of one block in one layer of one rank."""
        return self.kv_heads // tp_size * self.head_bytes * self.block_size

    def rank_bytes(self, tp_size: int) -> int:
        """Bytes of all layers of one rank."""
        return self.num_layers * self.num_blocks * self.block_bytes(tp_size)

    def layer_names(self) -> list[str]:
        return [f"layers.{number}" for number in range(self.num_layers)]

    def request_bytes(self, num_blocks: int) -> int:
        """Bytes of all layers and heads of a request of ``num_blocks`` blocks."""
        return num_blocks * self.num_layers * self.block_bytes(1)

    def heads_of(self, tp: TpRank) -> range:
        """The heads that a rank holds. The TP size divides the number of heads."""
        count = self.kv_heads // tp.size
        return range(tp.rank * count, (tp.rank + 1) * count)


def links_between(prefill_size: int, decode_size: int, shape: KvShape) -> list[tuple[TpRank, TpRank]]:
    """Pairs of ranks that share a head, prefill's first. Example: TP 2 to TP 1 → ranks 0 and 1, both to rank 0."""
    pairs = [(TpRank(p, prefill_size), TpRank(d, decode_size)) for p in range(prefill_size) for d in range(decode_size)]
    return [(p, d) for p, d in pairs if _shared(shape, p, d)]


def ranges_between(
    shape: KvShape, ranks: tuple[TpRank, TpRank], prefill_blocks: Sequence[int], decode_blocks: Sequence[int]
) -> list[Range]:
    """The ranges that one prefill rank writes into one decode rank, over all layers. Neighbouring blocks are one range.

    Example: 8 heads of 512 bytes, 16 tokens a block, TP 1 to TP 1, blocks 1, 2 to 5, 6 → one range of 128 KiB a layer.
    """
    return [
        row for layer in range(shape.num_layers) for row in _layer(shape, ranks, layer, prefill_blocks, decode_blocks)
    ]


def _layer(
    shape: KvShape, ranks: tuple[TpRank, TpRank], layer: int, ours: Sequence[int], theirs: Sequence[int]
) -> Iterator[Range]:
    prefill, decode = ranks
    heads, first = _shared(shape, prefill, decode), layer * shape.num_blocks
    sent, received = shape.block_bytes(prefill.size), shape.block_bytes(decode.size)
    head_bytes = shape.head_bytes * shape.block_size
    source_offset = (heads.start - shape.heads_of(prefill).start) * head_bytes
    target_offset = (heads.start - shape.heads_of(decode).start) * head_bytes
    rows = sorted(
        Range((first + a) * sent + source_offset, (first + b) * received + target_offset, len(heads) * head_bytes)
        for a, b in zip(ours, theirs, strict=True)
    )
    return _joined(rows)


def _joined(rows: Sequence[Range]) -> Iterator[Range]:
    """Rows that are neighbours on both sides become one."""
    start = 0
    for index, (row, after) in enumerate(pairwise(rows), 1):
        if (row.source + row.num_bytes, row.target + row.num_bytes) != after[:2]:
            yield _join(rows[start:index])
            start = index
    if rows:
        yield _join(rows[start:])


def _join(rows: Sequence[Range]) -> Range:
    return Range(rows[0].source, rows[0].target, sum(row.num_bytes for row in rows))


def _shared(shape: KvShape, prefill: TpRank, decode: TpRank) -> range:
    ours, theirs = shape.heads_of(prefill), shape.heads_of(decode)
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
