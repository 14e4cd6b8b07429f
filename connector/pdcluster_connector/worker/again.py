"""The second push of what arrived wrong: which bytes, straight from the request's blocks to decode's.

Planned from the block tables of the whole prompt and not from what was pushed before: a plan that went wrong once is
not carried out twice. What reaches decode by staging memory is not pushed again: the ranks of the engine would have to
reshard it together once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcluster_connector.core.content import common_spans
from pdcluster_connector.core.link import RegionCopy
from pdcluster_connector.core.ranges import (
    CopyShape,
    GroupSlice,
    MissingBlockError,
    TokenSpan,
    plan_ranges,
    require_held,
)
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.parts import LayerRecord, Part
from pdcluster_connector.worker.pushes import LivePush
from pdcluster_connector.worker.route import Route
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import Again


def plan_again(route: Route, live: LivePush, again: Again, *, now: float) -> tuple[Part, ...]:
    """What of this push lies where ``again`` says; empty where other ranks push it.

    Raises:
        ProtocolError: It went through staging memory, or prefill does not have it any more.
    """
    order, wanted = live.content, frozenset(again.regions)
    assert order is not None, "a push without sums has said done, and is over"
    if any(copy.target_index in wanted for copy in route.staged.values()):
        raise ProtocolError("what is wrong was resharded on prefill, which pushes such KV only once")
    try:
        copies = [copy for copy in route.direct_copies if copy.target_index in wanted]
        return tuple(part for copy in copies for part in _parts(route, live, order, copy, again.ranges, now))
    except MissingBlockError as error:
        raise ProtocolError(f"{error}, which decode needs again") from error


def _parts(
    route: Route, live: LivePush, order: ContentOrder, copy: RegionCopy, ranges: Sequence[TokenSpan], now: float
) -> Iterator[Part]:
    shape = route.link.shapes[copy.shape]
    for span in _wanted(shape, order.spans[shape.group], ranges):
        part = _slice(shape, span, order)
        require_held(shape, part, route.num_blocks[shape.group])
        planned = plan_ranges(shape, part)
        if planned.num_pieces:
            record = LayerRecord(0, copy.source_index, now, planned.total_bytes, unacked_bytes=planned.total_bytes)
            live.layers.append(record)
            yield Part(live.push, planned, copy.source_base, copy.target_base, record)


def _wanted(shape: CopyShape, spans: Sequence[TokenSpan], ranges: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Whole units that reach into ``ranges``, each once."""
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
