"""The resharder: one thread of a prefill rank that puts the KV of each finished layer together as decode's blocks.

    forward thread --begin_step, layer_saved, end_step--> inbox --> resharder thread <--all-to-all--> the other ranks
                                                                        |
    lane threads   --release(ticket)--> staging memory          on_outcome(Resharded | ReshardFailed | StepRead)

Every rank of the prefill TP group has a resharder, and gives it the same steps, items and layers in the same order. So
the collectives of all ranks are the same in number, order and size. A rank takes part even for requests that it has
given up. The thread waits for three things, each for a bounded time: the layer's device event, the other ranks, space.

    no space in time      this rank's parts of that layer are reported failed; it still serves the other ranks
    a rank dies or is late, or the device does not finish     the resharder is broken for good, with one reason: it
                          closes the group, so that the other ranks do not wait, and reports every later order failed
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, TypeAlias

import torch.distributed as dist

from pdcluster_connector.device import Device, DeviceEvent, NoStream, Stream
from pdcluster_connector.ending import EndingThread, left_s
from pdcluster_connector.reshard.feeds import ReshardItem
from pdcluster_connector.reshard.rounds import GroupRank, Round, StagedPart, plan_rounds
from pdcluster_connector.reshard.staging import StagingMemory, Ticket
from pdcluster_connector.reshard.tensors import Indices, Regrouping, Scratch, TokenRegion, close_reshard_group

_LOG: Final = logging.getLogger("vllm.pdcluster.reshard")
_POLL_S: Final = 0.0002
"""Seconds between two looks at a device event."""
_JOIN_S: Final = 1.0

GroupItems: TypeAlias = Mapping[int, Sequence[ReshardItem]]
"""The items of a step, by KV group."""


@dataclass(frozen=True, slots=True)
class Resharded:
    """Parts of one region of one step lie in staging, ready to be written.

    A part's bytes begin at ``offset + part.offset`` of the staging memory. ``part.item`` is an index into the step's
    items of the region's group. Release ``ticket`` once for each part, when nothing reads the part any more. A region
    of which this rank owns nothing is reported too, without parts.
    """

    step: int
    region: int
    offset: int
    parts: tuple[StagedPart, ...]
    ticket: Ticket | None


@dataclass(frozen=True, slots=True)
class ReshardFailed:
    """No further part of these regions of the step will come to this rank."""

    step: int
    regions: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StepRead:
    """No rank's resharder reads our KV of this step's items any more. Said after failures too."""

    step: int


ReshardOutcome: TypeAlias = Resharded | ReshardFailed | StepRead


@dataclass(frozen=True, slots=True)
class ResharderContext:
    """The dependencies of a resharder. ``regions``: by region index.

    ``wait_s``: the longest wait for a layer's computation, for the resharder's own work on the device, and for space.
    It is shorter than the group's timeout, for which the other ranks wait for us.
    """

    us: GroupRank
    regions: Mapping[int, TokenRegion]
    staging: StagingMemory
    device: Device
    wait_s: float = 10.0

    @property
    def staging_bytes(self) -> int:
        """The most bytes that one round stages. Two rounds fit: one is written while the other is filled."""
        return self.staging.num_bytes // 128 * 64


@dataclass(slots=True)
class _PlannedStep:
    """The step whose layers come now, and its plans: one for each KV group and shape of layer."""

    number: int
    items: GroupItems
    plans: dict[object, tuple[tuple[Round, ...], Indices] | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _SavedRegions:
    step: int
    regions: tuple[int, ...]
    event: DeviceEvent


@dataclass(frozen=True, slots=True)
class _EndedStep:
    step: int


@dataclass(frozen=True, slots=True)
class _Turn:
    """One round of one layer. ``may_stage``: every earlier round of the layer found space."""

    step: int
    regions: tuple[int, ...]
    may_stage: bool


class Resharder:
    """The forward thread gives orders, and any thread releases. The resharder's thread calls ``on_outcome``."""

    def __init__(
        self, context: ResharderContext, group: dist.ProcessGroup | None, on_outcome: Callable[[ReshardOutcome], object]
    ) -> None:
        """``group``: from ``open_reshard_group``. Only the resharder uses it, and closes it. None for TP 1."""
        self._context = context
        self._on_outcome = on_outcome
        self._inbox: SimpleQueue[_PlannedStep | _SavedRegions | _EndedStep | threading.Event | None] = SimpleQueue()
        self._failure = ""
        self._is_closing = False
        self._group = group
        self._group_lock = threading.Lock()
        """Guards ``_group``: ``close`` and the resharder's thread may both leave the group. Only the first one does."""
        self._number = 0
        self._step = _PlannedStep(0, {})
        self._stream: Stream = NoStream()
        self._scratch = Scratch(context.staging.tensor.device)
        self._thread = threading.Thread(target=self._main, name="pdcluster-reshard", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why the resharder is broken for good; empty: it is not. Any thread."""
        return self._failure

    def begin_step(self, step: int, items: GroupItems) -> None:
        """The layers that follow complete ``items``. Forward thread: never waits."""
        self._number = step
        self._inbox.put(_PlannedStep(step, items))

    def layer_saved(self, regions: Sequence[int], event: DeviceEvent) -> None:
        """Once ``event`` is complete, these regions of one layer are final for this step. Forward thread; no wait."""
        self._inbox.put(_SavedRegions(self._number, tuple(regions), event))

    def end_step(self) -> None:
        """No further region of this step is ordered; ``StepRead`` follows. Forward thread: never waits."""
        self._inbox.put(_EndedStep(self._number))

    def fence(self) -> threading.Event:
        """An event that is set when no rank's resharder reads our KV of the orders so far any more.

        Forward thread, before blocks are overwritten: never waits itself.
        """
        reached = threading.Event()
        self._inbox.put(reached)
        return reached

    def release(self, ticket: Ticket) -> None:
        """Nothing reads one part of the buffer any more. Any thread.

        Raises:
            KeyError: It is released more often than it has parts.
        """
        self._context.staging.release(ticket)

    def close(self, timeout_s: float) -> bool:
        """Ends thread and group. Orders that are not done are reported failed. Waits ``timeout_s`` + 1 s at most.

        Returns False if the thread still waits for another rank or the device, and may still read the KV cache.
        """
        self._is_closing = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            until = time.monotonic() + _JOIN_S
            leaving = EndingThread(self._leave_group)
            self._thread.join(left_s(until))
            leaving.wait(until)
        return not self._thread.is_alive()

    # Everything below runs in the resharder's thread.

    def _main(self) -> None:
        try:
            self._stream = self._context.device.open_stream(self._context.staging.tensor.device)
            with self._stream:
                self._on_orders()
        except Exception as error:  # noqa: BLE001  # top of a thread
            self._context.device.note(error)
            _LOG.exception("resharder failed rank=%d", self._context.us.rank)
            self._break(f"prefill's resharder failed: {error!r}")
            self._on_orders()
        finally:
            self._leave_group()

    def _on_orders(self) -> None:
        while (order := self._inbox.get()) is not None:
            match order:
                case _PlannedStep():
                    self._step = order
                case _SavedRegions():
                    self._serve(order)
                case _EndedStep(step):
                    self._on_outcome(StepRead(step))
                case threading.Event():
                    order.set()

    def _serve(self, order: _SavedRegions) -> None:
        """All regions of one layer, KV group by KV group."""
        for group in sorted({self._context.regions[index].group for index in order.regions}):
            regions = tuple(index for index in order.regions if self._context.regions[index].group == group)
            if self._step.items.get(group):
                self._serve_group(order, group, regions)

    def _serve_group(self, order: _SavedRegions, group: int, regions: tuple[int, ...]) -> None:
        if self._is_closing:
            self._break("prefill's resharder was closed")
        reason = self._failure
        try:
            reason = reason or self._reshard(order, group, regions)
        except (RuntimeError, TimeoutError) as error:
            self._context.device.note(error)
            self._break(f"prefill rank {self._context.us.rank} cannot exchange KV with the other ranks: {error}")
            reason = self._failure
        if reason:
            self._on_outcome(ReshardFailed(order.step, regions, reason))

    def _reshard(self, order: _SavedRegions, group: int, regions: tuple[int, ...]) -> str:
        """Runs every round of the layer. Returns why some of our parts will not come; empty: all have come."""
        planned = self._plan(group, regions)
        if isinstance(planned, str):
            return planned
        rounds, indices = planned
        self._wait_for(order.event, "the forward pass did not end a layer")
        reason = ""
        for planned_round in rounds:
            turn = _Turn(order.step, regions, may_stage=not reason)
            # We run a round even if we have no space: the other ranks wait for our heads.
            reason = self._run(turn, planned_round, indices) or reason
        if not rounds:
            for region in regions:
                self._on_outcome(Resharded(order.step, region, 0, (), None))
        return reason

    def _plan(self, group: int, regions: tuple[int, ...]) -> tuple[tuple[Round, ...], Indices] | str:
        """The layer's rounds, or why there are none. Planned once for each shape of layer, alike on every rank."""
        shapes = tuple(self._context.regions[index].shape for index in regions)
        plans = self._step.plans
        if (group, shapes) not in plans:
            try:
                rounds = plan_rounds(self._context.us, shapes, self._step.items[group], self._context.staging_bytes)
                plans[group, shapes] = rounds, Indices(self._context.staging.tensor.device)
            except ValueError as error:
                plans[group, shapes] = f"this step cannot be resharded: {error}"
        return plans[group, shapes]

    def _run(self, turn: _Turn, planned: Round, indices: Indices) -> str:
        """Runs one round. Returns why our parts are not in staging memory; empty: they are, or there are none, or this
        turn may not stage."""
        regions = [self._context.regions[index] for index in turn.regions]
        regrouping = Regrouping(planned, regions, indices, self._scratch)
        if planned.travels:
            regrouping.start(self._open_group())
        ticket = self._take_buffer(planned) if turn.may_stage else None
        try:
            regrouping.finish()
            if ticket is not None:
                regrouping.place(self._context.staging.tensor[ticket.offset : ticket.offset + ticket.num_bytes])
            self._wait_for(self._stream.record_event(), "the exchange did not end")
        except BaseException:
            if ticket is not None:
                self._context.staging.release(ticket, planned.num_parts)
            raise
        if planned.staged_bytes and ticket is None:
            return f"prefill's staging memory of {self._context.staging.num_bytes} bytes was full for too long"
        if turn.may_stage:
            self._hand_on(turn, planned, ticket)
        return ""

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("their group is closed")
        return self._group

    def _take_buffer(self, planned: Round) -> Ticket | None:
        if not planned.staged_bytes:
            return None
        deadline = time.monotonic() + self._context.wait_s
        return self._context.staging.take(
            planned.staged_bytes, planned.num_parts, deadline=deadline, is_closing=lambda: self._is_closing
        )

    def _hand_on(self, turn: _Turn, planned: Round, ticket: Ticket | None) -> None:
        offset = ticket.offset if ticket else 0
        for region, share in zip(turn.regions, planned.regions, strict=True):
            mine = ticket if share.parts else None
            self._on_outcome(Resharded(turn.step, region, offset, share.parts, mine))
            offset += share.staged_bytes

    def _wait_for(self, event: DeviceEvent, what: str) -> None:
        """``event`` is complete.

        Raises:
            TimeoutError: It is not complete within ``wait_s``, or the resharder is closing.
        """
        deadline = time.monotonic() + self._context.wait_s
        while not self._context.device.is_done(event):
            if self._is_closing or time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {self._context.wait_s:g} s")
            time.sleep(_POLL_S)

    def _break(self, reason: str) -> None:
        """Runs no further round: the ranks may not agree any more on which round comes next."""
        if not self._failure:
            self._failure = reason
            _LOG.error("resharder broken rank=%d reason=%r", self._context.us.rank, reason)
        self._leave_group()

    def _leave_group(self) -> bool:
        with self._group_lock:
            group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError, ValueError):
                close_reshard_group(group)
        return True
