"""Turns pairs of blocks into the byte ranges that one layer's push writes.

All offsets are relative to a region (one layer's KV memory of one rank), so they are computed once
per step for each *shape of copy* and serve every layer of that shape: a layer only adds its two base addresses.

    block b of a region:  base + b * block_stride   [ page 0 | page 1 | ... ]
    page, head-major:     [ row 0: token 0, 1, ... | row 1: ... ]     the rows of a push are adjacent

A *piece* is the most that lies side by side on both engines: the tokens of one row in a page, or of all rows of the
push if pages have the same size on both engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pdcluster_connector.core.tp_mapping import Share, stripe_tokens
from pdcluster_protocol.errors import ProtocolError

Offsets: TypeAlias = npt.NDArray[np.int64]
TokenSpan: TypeAlias = tuple[int, int]
"""Token positions [start, stop) of a prompt."""

Spans: TypeAlias = tuple[tuple[TokenSpan, ...], ...]
"""Spans of token positions, per KV group."""

NULL_BLOCK: Final = 0
"""vLLM's block that stands for "outside the window": never read, never to be written."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Where tokens and rows lie in one engine's region. ``offset``: bytes from a page's start to the push's first row.
    Strides are in bytes."""

    block_tokens: int
    block_stride: int
    page_tokens: int
    page_stride: int
    row_stride: int
    token_stride: int
    offset: int


@dataclass(frozen=True, slots=True)
class CopyShape:
    """How a push copies one kind of region. ``unit``: tokens that are pushed at once. ``step``: tokens in a piece.

    ``is_state``: one block for a request, whatever its length; a piece is the whole state, or a row of one of its runs.
    """

    group: int
    source: Grid
    target: Grid
    unit: int
    step: int
    num_rows: int
    piece_bytes: int
    share: Share
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """A span of one KV group and the blocks that hold it. On either engine the first block holds position ``start``.

    Empty when ``start == stop``.
    """

    start: int
    stop: int
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class ByteRanges:
    """Ranges to copy, relative to a region: ``source[i] .. source[i] + num_bytes[i]`` goes to ``target[i]``.

    Three int64 arrays of one length. ``num_pieces`` is how many pieces they were made of.
    """

    source: Offsets
    target: Offsets
    num_bytes: Offsets
    num_pieces: int

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())


class MissingBlockError(Exception):
    """Decode wants a position whose block prefill does not have."""


def require_held(shape: CopyShape, part: GroupSlice, num_blocks: int) -> None:
    """``part`` names a decode block for each of its tokens, and decode has these blocks. Decode has ``num_blocks``.

    Checked before any offset is made: a write to a block that does not exist would land outside of the KV cache, and an
    offset beyond 2^63 bytes would wrap around into a block of another request.

    Raises:
        ProtocolError: ``part`` names too few blocks, or one that decode does not have.
    """
    if part.start >= part.stop:
        return
    size, blocks = shape.target.block_tokens, part.target_blocks
    if len(blocks) < (needed := -(-part.stop // size) - part.start // size):
        raise ProtocolError(
            f"decode named {len(blocks)} blocks in KV group {shape.group} for tokens {part.start} to {part.stop}, "
            f"which are in {needed}"
        )
    for block in (min(blocks), max(blocks)):
        if block not in range(num_blocks):
            raise ProtocolError(
                f"decode reserved block {block} in KV group {shape.group}, and has blocks 0 to {num_blocks - 1}"
            )


def plan_ranges(shape: CopyShape, part: GroupSlice) -> ByteRanges:
    """The fewest ranges that copy ``part``. Positions whose decode block is the null block are left out.

    Raises:
        MissingBlockError: A wanted position is in prefill's null block.
    """
    tokens, sources, targets = _wanted(shape, part)
    source = _offsets(shape.source, sources, tokens, shape.num_rows)
    target = _offsets(shape.target, targets, tokens, shape.num_rows)
    return _join(source, target, shape.piece_bytes)


def wanted_bytes(shape: CopyShape, part: GroupSlice) -> int:
    """The bytes that this push moves of one region for ``part``, be it from the region or from staging memory.

    Raises:
        MissingBlockError: A wanted position is in prefill's null block.
    """
    return len(_wanted(shape, part)[0]) * shape.num_rows * shape.piece_bytes


def piece_tokens(shape: CopyShape, span: TokenSpan) -> Offsets:
    """First position of every piece of ``span`` in this push's share. Both engines count bytes by it."""
    start, stop = span
    if shape.is_state or start >= stop:
        return np.zeros(int(start < stop), np.int64)
    tokens = np.arange(start, -(-stop // shape.unit) * shape.unit, shape.step, dtype=np.int64)
    if shape.share.count == 1:
        return tokens
    shared: Offsets = tokens[tokens // stripe_tokens(shape.step) % shape.share.count == shape.share.index]
    return shared


def bytes_of(shape: CopyShape, spans: Sequence[TokenSpan]) -> int:
    """The bytes that this push moves of one region for ``spans``, all of whose positions decode wants."""
    return sum(len(piece_tokens(shape, span)) for span in spans) * shape.num_rows * shape.piece_bytes


def _wanted(shape: CopyShape, part: GroupSlice) -> tuple[Offsets, Offsets, Offsets]:
    """(first position, source block, target block) of every piece that decode wants."""
    tokens = piece_tokens(shape, (part.start, part.stop))
    sources = blocks_at(tokens, part.start, part.source_blocks, shape.source.block_tokens)
    targets = blocks_at(tokens, part.start, part.target_blocks, shape.target.block_tokens)
    wanted = targets != NULL_BLOCK
    if (sources[wanted] == NULL_BLOCK).any():
        raise MissingBlockError(f"prefill has no KV at token {int(tokens[wanted & (sources == NULL_BLOCK)][0])}")
    return tokens[wanted], sources[wanted], targets[wanted]


def blocks_at(tokens: Offsets, start: int, blocks: Sequence[int], block_tokens: int) -> Offsets:
    """The block that holds each of ``tokens`` (positions); the first of ``blocks`` holds position ``start``."""
    table: Offsets = np.asarray(blocks, np.int64)
    found: Offsets = table[tokens // block_tokens - start // block_tokens]
    return found


def _offsets(grid: Grid, blocks: Offsets, tokens: Offsets, num_rows: int) -> Offsets:
    """Offset of every piece. The pieces of one position's rows follow each other."""
    inside = tokens % grid.block_tokens
    pages, token = inside // grid.page_tokens, inside % grid.page_tokens
    first = blocks * grid.block_stride + pages * grid.page_stride + token * grid.token_stride + grid.offset
    rows = np.arange(num_rows, dtype=np.int64) * grid.row_stride
    offsets: Offsets = (first[:, None] + rows[None, :]).ravel()
    return offsets


def _join(source: Offsets, target: Offsets, piece_bytes: int) -> ByteRanges:
    """Pieces that follow each other on both sides become one range.

    Sorted by source first: vLLM first hands out the blocks that it freed last, so block tables of a used pool descend.
    """
    order = np.argsort(source, kind="stable")
    source, target = source[order], target[order]
    breaks = (np.diff(source) != piece_bytes) | (np.diff(target) != piece_bytes)
    starts = np.append(0, np.flatnonzero(breaks) + 1) if len(source) else np.empty(0, np.int64)
    num_bytes = np.diff(np.append(starts, len(source))) * piece_bytes
    return ByteRanges(source[starts], target[starts], num_bytes, len(source))
