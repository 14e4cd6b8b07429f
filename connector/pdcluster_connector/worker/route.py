"""Where a lane's bytes go: region pairs of two ranks, and each step's ranges over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdcluster_connector.core.layout import RankPair, RegionPair, pair_regions
from pdcluster_connector.core.regions import BlockSlice, ByteRanges, plan_ranges
from pdcluster_connector.core.sending import Commands
from pdcluster_connector.core.tp_mapping import Sharding, plan_pushes
from pdcluster_connector.steps import PushSlice
from pdcluster_connector.worker.orders import LayerSaved
from pdcluster_connector.worker.pushes import LivePush
from pdcluster_connector.worker.writes import Batch, LayerRecord, Part
from pdcluster_protocol.errors import ProtocolError, Unavailable
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.side_channel import Hello, RegionLayout, Welcome


@dataclass(frozen=True, slots=True)
class Route:
    """Region pairs in the order of prefill's regions; index = region index of ``LayerSaved``."""

    pairs: tuple[RegionPair, ...]


def plan_route(welcome: Welcome, boot_id: BootId, hello: Hello, regions: tuple[RegionLayout, ...]) -> Route:
    """The route from the prefill rank that said ``hello`` to the decode rank that answered ``welcome``.

    Raises:
        Unavailable: Another life of the decode engine answered than the one that reserved.
        ProtocolError: The two ranks share no KV head, or their layers do not match.
    """
    if welcome.boot_id != boot_id:
        raise Unavailable(
            f"decode engine {welcome.engine_id} has restarted: boot id {welcome.boot_id}, reserved under {boot_id}"
        )
    heads = hello.fingerprint.kv_heads
    prefill, decode = Sharding(hello.tp_size, heads), Sharding(welcome.tp_size, heads)
    ranks = (hello.tp_rank, welcome.tp_rank)
    planned = [push for push in plan_pushes(prefill, decode) if (push.prefill_rank, push.decode_rank) == ranks]
    if not planned:
        raise ProtocolError(f"prefill rank {ranks[0]} holds no KV head of decode rank {ranks[1]}")
    return Route(pair_regions(regions, welcome.regions, RankPair(prefill, decode, planned[0])))


@dataclass(slots=True)
class StepPlan:
    """The ranges of one step, for each push and each kind of block; made once, used by every layer."""

    step: int
    _ranges: dict[LivePush, dict[tuple[int, BlockSlice], ByteRanges]] = field(default_factory=dict)

    def add(self, route: Route, live: LivePush, part: PushSlice) -> Commands:
        """Plan ``part`` of ``live``; returns what the push says to it."""
        kinds = {(pair.group, pair.part) for pair in route.pairs}
        ranges = {
            (group, kind): plan_ranges(part.prefill_blocks[group], part.decode_blocks[group], kind)
            for group, kind in kinds
        }
        self._ranges[live] = ranges
        per_region = [ranges[pair.group, pair.part] for pair in route.pairs]
        live.num_blocks += sum(part_ranges.num_blocks for part_ranges in per_region)
        live.num_writes += sum(len(part_ranges.source) for part_ranges in per_region)
        num_layers = len({pair.layer_name for pair in route.pairs})
        num_bytes = sum(part_ranges.total_bytes for part_ranges in per_region)
        return live.push.plan(num_bytes, num_layers, is_last=part.is_last)

    def batches(self, route: Route, order: LayerSaved) -> Iterator[Batch]:
        """One batch for each region that became final: every push's part of it, fused."""
        for index in order.regions:
            parts = tuple(self._parts(route.pairs[index], index, order.at))
            if parts:
                yield Batch(order.event, parts)

    def _parts(self, pair: RegionPair, index: int, saved_at: float) -> Iterator[Part]:
        for live, by_kind in self._ranges.items():
            ranges = by_kind[pair.group, pair.part]
            if live.push.is_ended or not ranges.num_blocks:
                continue
            record = LayerRecord(self.step, index, saved_at, ranges.total_bytes, unacked_bytes=ranges.total_bytes)
            live.layers.append(record)
            yield Part(live.push, ranges, pair.source_base, pair.target_base, record)
