"""From pairs of blocks to the byte ranges that one layer's push writes.

All offsets are relative to a region (one layer's KV memory of one rank), so they are computed once
per step and serve every layer: a layer only adds its two base addresses.

A rank holds each block as its KV heads, head-major, so the heads that one rank sends to another are
one contiguous slice of the block (layout LBHNC of vLLM 0.32 ``v1/kv_cache_layout.py``):

    block b of region:  base + b * block_bytes  [ head 0 | head 1 | ... ]   slice = heads a..b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pdcluster_connector.core.tp_mapping import Push, Sharding

Offsets: TypeAlias = npt.NDArray[np.int64]

NULL_BLOCK: Final = 0
"""vLLM's block that stands for "outside the window": never read, never to be written."""


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """The part of every block that one prefill rank writes into one decode rank, in bytes."""

    prefill_block_bytes: int
    decode_block_bytes: int
    prefill_offset: int
    decode_offset: int
    num_bytes: int

    @property
    def is_whole_block(self) -> bool:
        return self.num_bytes == self.prefill_block_bytes == self.decode_block_bytes


@dataclass(frozen=True, slots=True)
class ByteRanges:
    """Ranges to copy, relative to a region: ``source[i] .. source[i] + num_bytes[i]`` goes to ``target[i]``.

    Three int64 arrays of one length. ``num_blocks`` is how many blocks they were made of.
    """

    source: Offsets
    target: Offsets
    num_bytes: Offsets
    num_blocks: int

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())


def block_slice(
    prefill: Sharding, decode: Sharding, push: Push, prefill_block_bytes: int, decode_block_bytes: int
) -> BlockSlice:
    """The bytes of each block that ``push`` moves.

    8 heads of 1 KiB, TP 4 to TP 2: prefill rank 1 holds heads 2..3 in 2 KiB blocks and writes them whole,
    at offset 2 KiB, into decode rank 0's 4 KiB blocks.

    Raises:
        ValueError: The two block sizes do not hold the same bytes per head.
    """
    sent, received = prefill.heads_of(push.prefill_rank), decode.heads_of(push.decode_rank)
    head_bytes = prefill_block_bytes // len(sent)
    if head_bytes * len(sent) != prefill_block_bytes or head_bytes * len(received) != decode_block_bytes:
        raise ValueError(
            f"blocks of {prefill_block_bytes} bytes with {len(sent)} KV heads (prefill) and "
            f"{decode_block_bytes} bytes with {len(received)} KV heads (decode) differ in bytes per head"
        )
    return BlockSlice(
        prefill_block_bytes,
        decode_block_bytes,
        (push.heads.start - sent.start) * head_bytes,
        (push.heads.start - received.start) * head_bytes,
        len(push.heads) * head_bytes,
    )


def plan_ranges(prefill_blocks: Sequence[int], decode_blocks: Sequence[int], part: BlockSlice) -> ByteRanges:
    """The fewest ranges that copy ``part`` of each prefill block into the decode block beside it.

    Pairs whose decode block is the null block are left out. Where whole blocks are adjacent on both
    sides they become one range.
    """
    source, target = np.asarray(prefill_blocks, np.int64), np.asarray(decode_blocks, np.int64)
    wanted = target != NULL_BLOCK
    source, target = source[wanted], target[wanted]
    starts = _run_starts(source, target) if part.is_whole_block else np.arange(len(source))
    lengths = np.diff(np.append(starts, len(source)))
    return ByteRanges(
        source[starts] * part.prefill_block_bytes + part.prefill_offset,
        target[starts] * part.decode_block_bytes + part.decode_offset,
        lengths * part.num_bytes,
        len(source),
    )


def _run_starts(source: Offsets, target: Offsets) -> Offsets:
    """Index of each pair that does not directly follow the pair before it on both sides."""
    if not len(source):
        return np.empty(0, np.int64)
    breaks = (np.diff(source) != 1) | (np.diff(target) != 1)
    return np.append(0, np.flatnonzero(breaks) + 1)
