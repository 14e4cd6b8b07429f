"""Between forward thread, resharder and lanes: says which part of a step is resharded, and which lane writes it.

    forward thread --slices of the step--> items --> Resharder --outcomes--> orders --> lanes
                                                        |
                                                        +--> read_step: no rank reads the blocks of that step any more

The items are made from the step's metadata and this engine's layout alone, so they are the same on every rank of the TP
group, whatever became of the rank's own pushes. A rank without token-major KV has a plain ``Resharding``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.device import Device, DeviceEvent
from pdcluster_connector.reshard import (
    GroupRank,
    Resharded,
    Resharder,
    ResharderContext,
    ReshardFailed,
    ReshardItem,
    ReshardOutcome,
    StagedPart,
    StagingBuffer,
    StagingMemory,
    StepRead,
    TokenPages,
    TokenRegion,
    TokenShape,
)
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import PushSlice
from pdcluster_connector.worker.lane import Lane
from pdcluster_connector.worker.orders import Staged, StagedWrite
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.side_channel import RankLayout, RegionLayout

_NEVER: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class StepPush:
    """A slice of the step, and the lanes that push it."""

    part: PushSlice
    lanes: tuple[Lane, ...]


class Resharding:
    """The calls that a prefill worker makes about resharding. Forward thread only; nothing but ``close`` waits.

    This class reshards nothing: every region leaves straight from its blocks.
    """

    read_step: int = _NEVER
    """The last step whose blocks on this rank no resharder reads any more, nor those of any earlier step."""

    def begin_step(self, step: int, pushes: Sequence[StepPush]) -> None:
        """The layers that follow complete ``pushes``. The caller has told the lanes of the step already."""

    def layer_saved(self, regions: range, event: DeviceEvent) -> None:
        """These regions (indices) are final for this step once ``event`` is complete."""

    def end_step(self) -> None:
        """Every region of the step was ordered."""

    def fence(self) -> threading.Event:
        """An event that is set once no resharder reads this rank's blocks of the steps so far any more."""
        reached = threading.Event()
        reached.set()
        return reached

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002  # used where a group reshards
        """Ends resharding. Unfinished items are reported to the lanes as failed. Waits ``timeout_s`` + 1 s at most.

        Returns whether no resharder reads KV any more.
        """
        return True


@dataclass(frozen=True, slots=True)
class TokenMemory:
    """This rank's token-major KV as tensors, and the TP group that reshards it.

    ``group``: from ``open_reshard_group``; None for TP 1. The caller keeps no reference to the group: its sockets
    close with the last reference. ``data``: by region index, uint8 [bytes of the region], borrowed while we run.
    """

    group: dist.ProcessGroup | None
    data: Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _StepParts:
    """Where the outcomes of a step go. ``pushes``: by KV group, in the order of its items."""

    items: Mapping[int, Sequence[ReshardItem]]
    pushes: Mapping[int, Sequence[StepPush]]
    lanes: tuple[Lane, ...]


class GroupResharding(Resharding):
    """Reshards in the TP group of ``TokenMemory``. Outcomes come in the resharder's thread."""

    def __init__(
        self, layout: RankLayout, memory: TokenMemory, staging: StagingMemory, device: Device, settings: Settings
    ) -> None:
        """Engine start.

        Raises:
            ConfigError: The staging memory does not hold a page of a layer.
        """
        regions = {index: TokenRegion(data, _shape(layout, index), layout.regions[index].group)
                   for index, data in memory.data.items()}  # fmt: skip
        context = ResharderContext(
            GroupRank(layout.tp_rank, layout.tp_size), regions, staging, device, settings.reshard_wait_s
        )
        _require_staging(layout, context)
        self.read_step = 0
        self._staging = staging
        self._group_of = {index: region.group for index, region in regions.items()}
        self._pages = {region.group: region.shape.pages for region in regions.values()}
        self._steps: dict[int, _StepParts] = {}
        """The forward thread adds, the resharder's thread takes away."""
        self._resharder = Resharder(context, memory.group, self._on_outcome)

    def begin_step(self, step: int, pushes: Sequence[StepPush]) -> None:
        items: dict[int, list[ReshardItem]] = {group: [] for group in self._pages}
        sources: dict[int, list[StepPush]] = {group: [] for group in self._pages}
        for push in pushes:
            for group, pages in self._pages.items():
                if item := plan_item(push.part, group, pages):
                    items[group].append(item)
                    sources[group].append(push)
        lanes = dict.fromkeys(lane for push in pushes for lane in push.lanes)
        self._steps[step] = _StepParts(items, sources, tuple(lanes))
        self._resharder.begin_step(step, items)

    def layer_saved(self, regions: range, event: DeviceEvent) -> None:
        mine = [index for index in regions if index in self._group_of]
        if mine:
            self._resharder.layer_saved(mine, event)

    def end_step(self) -> None:
        self._resharder.end_step()

    def fence(self) -> threading.Event:
        return self._resharder.fence()

    def close(self, timeout_s: float) -> bool:
        return self._resharder.close(timeout_s)

    # Everything below runs in the resharder's thread.

    def _on_outcome(self, outcome: ReshardOutcome) -> None:
        match outcome:
            case Resharded(step=step):
                self._hand_out(outcome, self._steps[step])
            case ReshardFailed(step=step):
                for lane in self._steps[step].lanes:
                    lane.post(outcome)
            case StepRead(step):
                for lane in self._steps.pop(step).lanes:
                    lane.post(outcome)
                self.read_step = step

    def _hand_out(self, outcome: Resharded, step: _StepParts) -> None:
        """Posts each part to the lanes of its decode TP rank. There is one lane for each stage; only one stage has
        the layer. None: the process had no room for the lane."""
        group, now = self._group_of[outcome.region], time.monotonic()
        orders: dict[Lane, list[StagedWrite]] = {}
        for part in outcome.parts:
            push, item = step.pushes[group][part.item], step.items[group][part.item]
            lanes = [lane for lane in push.lanes if lane.decode_rank % item.decode_tp_size == part.decode_rank]
            if not lanes and outcome.ticket is not None:
                self._resharder.release(outcome.ticket)
                continue
            write = self._write(outcome, push.part, item, part, holders=len(lanes))
            for lane in lanes:
                orders.setdefault(lane, []).append(write)
        for lane, writes in orders.items():
            lane.post(Staged(outcome.step, outcome.region, tuple(writes), now))

    def _write(
        self, outcome: Resharded, source: PushSlice, item: ReshardItem, part: StagedPart, *, holders: int
    ) -> StagedWrite:
        assert outcome.ticket is not None, "a part without space"
        buffer = StagingBuffer(partial(self._resharder.release, outcome.ticket), holders)
        key = PushKey(source.transfer_id, source.attempt)
        return StagedWrite(key, item, part, self._staging.address + outcome.offset, buffer)


def plan_item(part: PushSlice, group: int, ours: TokenPages) -> ReshardItem | None:
    """The tokens of one KV group that the slice completes; None: the engines' blocks or pages do not fit each other.

    The lanes refuse such a decode engine at the handshake; its slice must not spoil the step for other slices.
    """
    piece = part.groups[group]
    block, page = part.target.block_tokens[group], part.target.page_tokens[group]
    small, large = sorted((page, ours.page_tokens))
    if small < 1 or block < 1 or large % small or block % page or max(block, ours.block_tokens) % min(
        block, ours.block_tokens
    ):  # fmt: skip
        return None
    tables = piece.source_blocks, piece.target_blocks
    return ReshardItem(part.request_id, part.target.tp_size, piece.start, piece.stop, *tables, block, small)


def _shape(layout: RankLayout, index: int) -> TokenShape:
    region = layout.regions[index]
    token_bytes = region.page_bytes // region.page_tokens
    cell_bytes = token_bytes // len(Sharding(layout.tp_size, region.heads).heads_of(layout.tp_rank))
    pages = region.page_tokens, region.pages_per_block, token_bytes, region.page_stride, region.block_stride
    return TokenShape(region.heads, cell_bytes, TokenPages(*pages))


def _require_staging(layout: RankLayout, context: ResharderContext) -> None:
    """One round can stage a page of any layer with all heads of the model, as a decode engine of TP 1 wants it.

    Raises:
        ConfigError: It cannot.
    """
    pages: dict[tuple[str, int], int] = {}
    for index, region in context.regions.items():
        key = (layout.regions[index].layer_name, region.group)
        pages[key] = pages.get(key, 0) + _whole_page_bytes(layout.regions[index], region)
    if (largest := max(pages.values())) > context.staging_bytes:
        raise ConfigError(
            f"staging_bytes is {context.staging.num_bytes}, and a page of one layer has {largest} bytes: "
            f"use {-(-largest // 64) * 128} or more"
        )


def _whole_page_bytes(layout: RegionLayout, region: TokenRegion) -> int:
    return layout.page_tokens * region.shape.kv_heads * region.shape.cell_bytes
