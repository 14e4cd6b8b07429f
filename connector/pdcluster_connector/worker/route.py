"""Where a lane's bytes go: the link of two ranks, and each step's ranges over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdcluster_connector.core.link import Link, RegionCopy, plan_link
from pdcluster_connector.core.ranges import ByteRanges, MissingBlockError, plan_ranges
from pdcluster_connector.core.sending import Commands
from pdcluster_connector.steps import PushSlice
from pdcluster_connector.worker.orders import LayerSaved
from pdcluster_connector.worker.pushes import LivePush
from pdcluster_connector.worker.writes import Batch, LayerRecord, Part
from pdcluster_protocol.errors import ProtocolError, Unavailable
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.side_channel import Hello, Welcome


@dataclass(frozen=True, slots=True)
class Route:
    """A link, and its copies by the index of prefill's region, as ``LayerSaved`` names it."""

    link: Link
    by_region: dict[int, RegionCopy]
    num_layers: int


def plan_route(welcome: Welcome, boot_id: BootId, hello: Hello) -> Route:
    """The route from the prefill rank that said ``hello`` to the decode rank that answered ``welcome``.

    Raises:
        Unavailable: Another life of the decode engine answered than the one that reserved.
        ProtocolError: The two ranks hold a layer differently.
    """
    if welcome.boot_id != boot_id:
        raise Unavailable(
            f"decode engine {welcome.engine_id} has restarted: boot id {welcome.boot_id}, reserved under {boot_id}"
        )
    link = plan_link(hello.layout, welcome.layout)
    if any(copy.is_resharded for copy in link.copies):
        raise ProtocolError(
            f"token-major KV cannot go from TP {hello.layout.tp_size} to TP {welcome.layout.tp_size}: "
            "use one TP on both"
        )
    by_region = {copy.source_index: copy for copy in link.copies}
    return Route(link, by_region, len({copy.layer_name for copy in link.copies}))


@dataclass(slots=True)
class StepPlan:
    """The ranges of one step, for each push and each shape of copy; made once, used by every layer."""

    step: int
    _ranges: dict[LivePush, list[ByteRanges]] = field(default_factory=dict)

    def add(self, route: Route, live: LivePush, part: PushSlice, *, now: float) -> Commands:
        """Plan ``part`` of ``live``; returns what the push says to it."""
        try:
            ranges = [plan_ranges(shape, part.groups[shape.group]) for shape in route.link.shapes]
        except MissingBlockError as error:
            return live.push.give_up(f"{error}, which decode needs", now=now)
        self._ranges[live] = ranges
        per_region = [ranges[copy.shape] for copy in route.link.copies]
        live.num_pieces += sum(part_ranges.num_pieces for part_ranges in per_region)
        live.num_writes += sum(len(part_ranges.source) for part_ranges in per_region)
        num_bytes = sum(part_ranges.total_bytes for part_ranges in per_region)
        return live.push.plan(num_bytes, route.num_layers, is_last=part.is_last)

    def batches(self, route: Route, order: LayerSaved) -> Iterator[Batch]:
        """One batch for each region that became final: every push's part of it, fused."""
        for index in order.regions:
            copy = route.by_region.get(index)
            parts = tuple(self._parts(copy, order.at)) if copy else ()
            if parts:
                yield Batch(order.event, parts)

    def _parts(self, copy: RegionCopy, saved_at: float) -> Iterator[Part]:
        for live, by_shape in self._ranges.items():
            ranges = by_shape[copy.shape]
            if live.push.is_ended or not ranges.num_pieces:
                continue
            num_bytes = ranges.total_bytes
            record = LayerRecord(self.step, copy.source_index, saved_at, num_bytes, unacked_bytes=num_bytes)
            live.layers.append(record)
            yield Part(live.push, ranges, copy.source_base, copy.target_base, record)
