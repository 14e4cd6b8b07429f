"""Plans the second push of content that arrived wrong, straight from the request's blocks to decode's.

The plan is made from the block tables of the whole prompt, not from the first push's plan: a plan that went wrong is
not carried out twice. KV that reached decode through staging memory does not go through it again: the ranks of the
engine would have to reshard it together once more. Instead each rank writes its own heads, token by token. That takes
many writes, so their number has a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pdcluster_connector.core.content import common_spans
from pdcluster_connector.core.link import RegionCopy
from pdcluster_connector.core.ranges import (
    ByteRanges,
    CopyShape,
    GroupSlice,
    MissingBlockError,
    TokenSpan,
    plan_ranges,
    require_held,
)
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.batches import LayerRecord, Part
from pdcluster_connector.worker.pushes import LivePush
from pdcluster_connector.worker.route import Route
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import Again

MAX_WRITES: Final = 1 << 15
"""The most writes of a second push. The lane's other requests wait for them: 2.5 s with loopback TCP (75 us each)."""


def plan_again(route: Route, live: LivePush, again: Again, *, now: float) -> tuple[Part, ...]:
    """The parts of this push that ``again`` names; empty: only other ranks push such parts.

    Raises:
        ProtocolError: They take too many writes, prefill lacks a block of them, or decode does.
    """
    order, wanted = live.content, frozenset(again.regions)
    assert order is not None, "a push without sums has said done, and is over"
    planned: list[tuple[RegionCopy, ByteRanges]] = []
    try:
        for copy, shape in route.copies_from_blocks():
            if copy.target_index in wanted:
                planned += ((copy, ranges) for ranges in _ranges(route, order, shape, again.ranges))
                _require_few(planned)
    except MissingBlockError as error:
        raise ProtocolError(f"{error}, which decode needs again") from error
    return tuple(_part(live, copy, ranges, now) for copy, ranges in planned)


def _ranges(route: Route, order: ContentOrder, shape: CopyShape, wanted: Sequence[TokenSpan]) -> Iterator[ByteRanges]:
    for span in _wanted(shape, order.spans[shape.group], wanted):
        part = _slice(shape, span, order)
        require_held(shape, part, route.num_blocks[shape.group])
        ranges = plan_ranges(shape, part)
        if ranges.num_pieces:
            yield ranges


def _require_few(planned: Sequence[tuple[RegionCopy, ByteRanges]]) -> None:
    num_writes = sum(len(ranges.source) for _, ranges in planned)
    if num_writes > MAX_WRITES:
        raise ProtocolError(
            f"what is wrong takes more than {MAX_WRITES} writes of prefill to push again: it needs another attempt"
        )


def _part(live: LivePush, copy: RegionCopy, ranges: ByteRanges, now: float) -> Part:
    record = LayerRecord(0, copy.source_index, now, ranges.total_bytes, unacked_bytes=ranges.total_bytes)
    live.layers.append(record)
    return Part(live.push, ranges, copy.source_base, copy.target_base, record)


def _wanted(shape: CopyShape, spans: Sequence[TokenSpan], ranges: Sequence[TokenSpan]) -> list[TokenSpan]:
    """The positions of ``spans`` in all units that reach into ``ranges``, each once."""
    unit = 1 if shape.is_state else shape.unit
    units: list[TokenSpan] = []
    for start, stop in sorted(ranges):
        begin, end = start // unit * unit, -(-stop // unit) * unit
        if units and begin <= units[-1][1]:
            begin = units.pop()[0]
        units.append((begin, end))
    return common_spans(spans, units)


def _slice(shape: CopyShape, span: TokenSpan, order: ContentOrder) -> GroupSlice:
    sources, targets = order.tables[shape.group], order.targets[shape.group]
    if shape.is_state:
        return GroupSlice(*span, sources, targets)
    return GroupSlice(
        *span, _covering(shape.source.block_tokens, span, sources), _covering(shape.target.block_tokens, span, targets)
    )


def _covering(block_tokens: int, span: TokenSpan, blocks: Sequence[int]) -> Sequence[int]:
    start, stop = span
    return blocks[start // block_tokens : -(-stop // block_tokens)]
