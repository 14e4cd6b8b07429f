"""Where a lane's bytes go: the link of two ranks, and each step's ranges over it.

A region is copied *directly*, from the request's blocks, or it is *staged*: the resharder brings decode's blocks
together in staging memory, and says for each part where it lies. The link decides once which of the two it is. The
route also knows which direct copies have small strips; a step gathers these where that saves writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter

from pdcluster_connector.core.gathering import StripRun, is_small_strip, num_writes, plan_gathers
from pdcluster_connector.core.link import Link, RegionCopy, plan_direct_shapes, plan_link, require_possible
from pdcluster_connector.core.ranges import (
    ByteRanges,
    CopyShape,
    MissingBlockError,
    plan_ranges,
    require_held,
    wanted_bytes,
)
from pdcluster_connector.core.sending import PushKey, SendingCommands
from pdcluster_connector.reshard import StagedPart, StepRead, TokenPages, write_rows
from pdcluster_connector.steps import PushSlice, PushTarget
from pdcluster_connector.worker.batches import Batch, LayerRecord, Part
from pdcluster_connector.worker.orders import LayerSaved, Staged, StagedWrite, StepEnded
from pdcluster_connector.worker.pushes import LivePush
from pdcluster_protocol.errors import ProtocolError, Unavailable
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.side_channel import Hello, RankLayout, Welcome


@dataclass(frozen=True, slots=True)
class Route:
    """A link, and its copies by the index of prefill's region, by which ``LayerSaved`` and ``Staged`` name the region.

    A region has one copy, or, if it is a state that is split anew, one for each of its runs.
    """

    link: Link
    direct: dict[int, tuple[RegionCopy, ...]]
    staged: dict[int, RegionCopy]
    num_layers: int
    last_order: type[StepEnded | StepRead]
    """The order that ends a step on this route: ``StepRead`` if regions are staged, else ``StepEnded``."""
    num_blocks: Mapping[int, int]
    """Blocks that decode has in each KV group."""
    shapes_from_blocks: Mapping[int, CopyShape] = field(default_factory=dict)
    """For a second push: how a staged region goes straight from its blocks, with a write for each token."""
    small_strips: frozenset[int] = frozenset()
    """Shapes of direct copies whose strips may be gathered."""

    @property
    def direct_copies(self) -> Iterator[RegionCopy]:
        return chain.from_iterable(self.direct.values())

    def copies_from_blocks(self) -> Iterator[tuple[RegionCopy, CopyShape]]:
        """Every copy of the link, with the shape that it has without staging memory."""
        yield from ((copy, self.link.shapes[copy.shape]) for copy in self.direct_copies)
        yield from ((copy, self.shapes_from_blocks[index]) for index, copy in self.staged.items())

    def shapes_of(self, copies: Iterable[RegionCopy]) -> dict[int, CopyShape]:
        """The shapes of ``copies``, by their numbers."""
        return {copy.shape: self.link.shapes[copy.shape] for copy in copies}

    def require_fit(self, part: PushSlice) -> None:
        """The reservation is true of decode's memory. A push by a false one would spoil other pushes of the lane.

        Raises:
            ProtocolError: It is not. The message names both values.
        """
        self.require_pages(part.target)
        for shape in self.link.shapes:
            require_held(shape, part.groups[shape.group], self.num_blocks[shape.group])

    def require_pages(self, target: PushTarget) -> None:
        """The reservation is true of decode's block sizes, and of the page sizes of staged regions.

        Raises:
            ProtocolError: It is not. The message names both values.
        """
        for shape in self.link.shapes if target.block_tokens else ():
            if not shape.is_state and (size := target.block_tokens[shape.group]) != shape.target.block_tokens:
                raise ProtocolError(
                    f"decode engine {target.engine_id} reserved blocks of {size} tokens in KV group {shape.group}, but "
                    f"holds {shape.target.block_tokens}: run the same pdcluster everywhere"
                )
        for shape in self.shapes_of(self.staged.values()).values():
            said = target.block_tokens[shape.group], target.page_tokens[shape.group]
            if said != (found := (shape.target.block_tokens, shape.target.page_tokens)):
                raise ProtocolError(
                    f"decode engine {target.engine_id} reserved blocks and pages of {said} tokens in KV group "
                    f"{shape.group}, but holds {found}: run the same pdcluster everywhere"
                )


def plan_route(
    welcome: Welcome, boot_id: BootId, hello: Hello, *, can_reshard: bool = False, can_gather: bool = False
) -> Route:
    """The route from the prefill rank that said ``hello`` to the decode rank that answered ``welcome``.

    Raises:
        Unavailable: The decode engine has restarted since it reserved.
        ProtocolError: The two ranks hold a layer differently, decode's layout is impossible, or KV must be resharded
            and ``can_reshard`` is False.
    """
    if welcome.boot_id != boot_id:
        raise Unavailable(
            f"decode engine {welcome.engine_id} has restarted: boot id {welcome.boot_id}, reserved under {boot_id}"
        )
    require_possible(welcome.layout, f"decode engine {welcome.engine_id}")
    link = plan_link(hello.layout, welcome.layout)
    staged = {copy.source_index: copy for copy in link.copies if copy.is_resharded}
    if staged and not can_reshard:
        raise ProtocolError(
            f"token-major KV cannot go from TP {hello.layout.tp_size} to TP {welcome.layout.tp_size} without a "
            "resharder, which this prefill rank does not have: use one TP on both"
        )
    in_order = (copy for copy in link.copies if not copy.is_resharded)
    direct = {index: tuple(copies) for index, copies in groupby(in_order, key=attrgetter("source_index"))}
    num_layers = len({copy.layer_name for copy in link.copies})
    last_order = StepRead if staged else StepEnded
    from_blocks = plan_direct_shapes(link, hello.layout, welcome.layout)
    small = frozenset(number for number, shape in enumerate(link.shapes) if can_gather and is_small_strip(shape))
    return Route(link, direct, staged, num_layers, last_order, _num_blocks(welcome.layout), from_blocks, small)


@dataclass(slots=True)
class StepPlan:
    """The ranges of one step, for each push and each shape of copy; made once, used by every layer."""

    step: int
    _ranges: dict[LivePush, dict[int, ByteRanges]] = field(default_factory=dict)
    """The ranges of each shape that is copied directly."""
    _gathers: dict[LivePush, dict[int, tuple[StripRun, ...]]] = field(default_factory=dict)
    """The gathers of each shape in ``Route.small_strips``."""
    _pushes: dict[PushKey, LivePush] = field(default_factory=dict)
    _unread: list[LivePush] = field(default_factory=list)
    """Staged pushes whose prompt ends with this step. They are whole when all resharders have read its blocks."""
    _rows: dict[tuple[StagedPart, int], ByteRanges] = field(default_factory=dict)
    """By staged part and shape. Layers of one shape are staged as the same parts."""

    @property
    def staging_pushes(self) -> list[LivePush]:
        """Pushes that this step plans to take from staging memory."""
        return list(self._pushes.values())

    def add(self, route: Route, live: LivePush, part: PushSlice, *, now: float) -> SendingCommands:
        """Plans ``part`` of ``live``; returns the push's commands."""
        try:
            ranges, num_staged = _plan(route, part)
        except MissingBlockError as error:
            return live.push.give_up(f"{error}, which decode needs", now=now)
        except ProtocolError as error:
            return live.push.give_up(str(error), now=now)
        gathers = {number: plan_gathers(route.link.shapes[number], ranges[number]) for number in route.small_strips}
        self._ranges[live], self._gathers[live] = ranges, gathers
        per_region = [(ranges[copy.shape], gathers.get(copy.shape, ())) for copy in route.direct_copies]
        live.num_pieces += sum(of_region.num_pieces for of_region, _ in per_region)
        live.num_writes += sum(num_writes(of_region, gathered) for of_region, gathered in per_region)
        num_bytes = sum(of_region.total_bytes for of_region, _ in per_region) + num_staged
        if not route.staged:
            return live.push.plan(num_bytes, route.num_layers, is_last=part.is_last)
        self._pushes[live.push.key] = live
        self._unread += [live] if part.is_last else []
        return live.push.plan(num_bytes, route.num_layers, is_last=False)

    def batches(self, route: Route, order: LayerSaved) -> Iterator[Batch]:
        """One batch for each region that became final, with the parts of all pushes."""
        for index in order.regions:
            parts = tuple(part for copy in route.direct.get(index, ()) for part in self._parts(copy, order.at))
            if parts:
                yield Batch(order.event, parts)

    def staged_batch(self, route: Route, order: Staged) -> Batch:
        """The parts that are still wanted. The buffers of the others are released."""
        copy = route.staged.get(order.region)
        parts = []
        for write in order.writes:
            live = self._pushes.get(write.key)
            if copy is None or live is None or live.push.is_ended:
                write.buffer.release()
            else:
                parts.append(self._staged_part(route, copy, live, write, order.at))
        return Batch(None, tuple(parts))

    def read(self, route: Route) -> Iterator[tuple[LivePush, SendingCommands]]:
        """The commands of the pushes that end with this step. No rank's resharder reads the step's blocks any more.

        A push is whole only now: while other ranks may still need heads of ours, it can be given up.
        """
        for live in self._unread:
            yield live, live.push.plan(0, route.num_layers, is_last=True)

    def _parts(self, copy: RegionCopy, saved_at: float) -> Iterator[Part]:
        for live, by_shape in self._ranges.items():
            ranges = by_shape[copy.shape]
            if live.push.is_ended or not ranges.num_pieces:
                continue
            record = self._record(live, copy, saved_at, ranges.total_bytes)
            gathers = self._gathers[live].get(copy.shape, ())
            yield Part(live.push, ranges, copy.source_base, copy.target_base, record, gathers=gathers)

    def _staged_part(self, route: Route, copy: RegionCopy, live: LivePush, write: StagedWrite, at: float) -> Part:
        key = (write.part, copy.shape)
        if key not in self._rows:
            self._rows[key] = write_rows(write.part, write.item, _decode_pages(route.link.shapes[copy.shape]))
        ranges = self._rows[key]
        live.num_pieces += ranges.num_pieces
        live.num_writes += len(ranges.source)
        record = self._record(live, copy, at, ranges.total_bytes)
        return Part(live.push, ranges, write.base, copy.target_base, record, write.buffer)

    def _record(self, live: LivePush, copy: RegionCopy, saved_at: float, num_bytes: int) -> LayerRecord:
        record = LayerRecord(self.step, copy.source_index, saved_at, num_bytes, unacked_bytes=num_bytes)
        live.layers.append(record)
        return record


def _plan(route: Route, part: PushSlice) -> tuple[dict[int, ByteRanges], int]:
    """The ranges of each shape that is copied directly, and the bytes that will come through staging memory.

    Raises:
        MissingBlockError: Decode wants tokens that prefill does not have.
        ProtocolError: The reservation does not fit the decode rank.
    """
    route.require_fit(part)
    direct, staged = route.shapes_of(route.direct_copies), route.shapes_of(route.staged.values())
    ranges = {number: plan_ranges(shape, part.groups[shape.group]) for number, shape in direct.items()}
    num_bytes = {number: wanted_bytes(shape, part.groups[shape.group]) for number, shape in staged.items()}
    return ranges, sum(num_bytes[copy.shape] for copy in route.staged.values())


def _num_blocks(decode: RankLayout) -> dict[int, int]:
    """The number of blocks of each KV group: that of its region with the fewest."""
    found: dict[int, int] = {}
    for region in decode.regions:
        found[region.group] = min(region.num_blocks, found.get(region.group, region.num_blocks))
    return found


def _decode_pages(shape: CopyShape) -> TokenPages:
    grid = shape.target
    pages = grid.block_tokens // grid.page_tokens
    return TokenPages(grid.page_tokens, pages, grid.token_stride, grid.page_stride, grid.block_stride)
