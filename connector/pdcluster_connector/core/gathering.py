"""Chooses the strips that prefill gathers in staging memory before they leave, and their order there.

If decode's TP is larger than prefill's, a block of prefill has one strip for each of several decode ranks. Each strip
is a whole block there. Adjacent blocks of decode come from distant strips, so each strip would be a write of its own:

    prefill's blocks       decode rank 1's            in staging memory, as decode rank 1 has them
    7: [ s0 | s1 ]  ---->  21: [ s1 of 7 ]            [ s1 of 3 | s1 of 7 ]   one write, to 20
    3: [ s0 | s1 ]  ---->  20: [ s1 of 3 ]

With or without gathering, the same bytes come to the same places on decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np

from pdcluster_connector.core.ranges import ByteRanges, CopyShape, Offsets
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

MOST_STRIP_BYTES: Final = 8 << 10
"""Copying a larger strip may cost more than the writes that it saves. Times relative to no gathering, with half as many
writes (``benchmarks.strips``, TP 1→2 over TCP): strips of 8 KiB take 0.5 on loopback and 1.0 at 2 Gbit/s, strips of
32 KiB take 1.5 (decisions 0020 and 0023)."""
LEAST_GAIN: Final = 2
"""Least ratio of strips to writes: with a smaller one no gain was measured. In a scattered pool the ratio is 1."""
MOST_BUFFER_BYTES: Final = 1 << 20
"""Most bytes of one gather: 128 strips of 8 KiB. Smaller buffers come back sooner. Each further buffer costs at most
one more write."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StripRun:
    """Strips of ``strip_bytes`` that lie side by side in one buffer, in the order of decode's blocks.

    ``sources``: where each strip begins in prefill's region, in bytes: ``first_source`` plus a multiple of
    ``step_bytes``. ``strips``: the ranges that write the strips straight from the blocks. ``writes``: the ranges that
    write the strips from the buffer, with sources counted from the buffer's first byte.
    """

    sources: Offsets
    first_source: int
    step_bytes: int
    strip_bytes: int
    strips: ByteRanges
    writes: ByteRanges

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return len(self.sources) * self.strip_bytes


def may_have_strips(layout: RankLayout) -> bool:
    """Whether some decode engine of a larger TP would get small strips from this prefill rank."""
    return any(_may_be_cut(region, layout) for region in layout.regions)


def is_small_strip(shape: CopyShape) -> bool:
    """Whether each piece is a small part of prefill's page and all of decode's page, without a gap to the next page."""
    ours, theirs = shape.source, shape.target
    is_whole_page = shape.num_rows == 1 and ours.page_tokens == theirs.page_tokens == shape.step
    is_dense = theirs.page_stride == shape.piece_bytes and theirs.offset == 0
    is_part = ours.page_stride > shape.piece_bytes
    return not shape.is_state and is_whole_page and is_dense and is_part and shape.piece_bytes <= MOST_STRIP_BYTES


def plan_gathers(shape: CopyShape, ranges: ByteRanges, buffer_bytes: int = MOST_BUFFER_BYTES) -> tuple[StripRun, ...]:
    """The gathers of ``ranges``, whose ``shape`` has small strips; empty: gathers would save too few writes.

    ``buffer_bytes``: the most bytes of one gather, at least a strip's.

    Example: strips for decode's blocks 21, 20, 31 and 30 are one buffer and two writes.
    """
    order = np.argsort(ranges.target)
    most = buffer_bytes // shape.piece_bytes
    buffers = [order[first : first + most] for first in range(0, len(order), most)]
    gathers = tuple(_gather(shape, ranges, chosen) for chosen in buffers)
    return gathers if num_writes(ranges, gathers) * LEAST_GAIN <= len(order) else ()


def num_writes(ranges: ByteRanges, gathers: tuple[StripRun, ...]) -> int:
    """The number of writes of ``gathers``, or of ``ranges`` if nothing is gathered."""
    return sum(len(gather.writes.source) for gather in gathers) if gathers else len(ranges.source)


def _gather(shape: CopyShape, ranges: ByteRanges, chosen: Offsets) -> StripRun:
    source, target, size = ranges.source[chosen], ranges.target[chosen], shape.piece_bytes
    starts = np.flatnonzero(np.diff(target, prepend=-size - 1) != size)
    num_bytes = np.diff(np.append(starts, len(target))) * size
    strips = ByteRanges(source, target, np.full(len(target), size, np.int64), len(target))
    writes = ByteRanges(starts * size, target[starts], num_bytes, len(target))
    step = gcd(shape.source.block_stride, shape.source.page_stride)
    return StripRun(source, shape.source.offset, step, size, strips, writes)


def _may_be_cut(region: RegionLayout, layout: RankLayout) -> bool:
    if region.kind is not RegionKind.HEADS or layout.tp_size >= region.heads:
        return False
    num_heads = len(Sharding(layout.tp_size, region.heads).heads_of(layout.tp_rank))
    return num_heads > 1 and region.page_bytes // num_heads <= MOST_STRIP_BYTES
