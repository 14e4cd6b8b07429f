"""The worker half of a prefill engine: hands each finished layer to the lanes.

Called by vLLM's forward thread only. Nothing here waits for a network, except ``close`` and the bounded wait in
``protect_preempted``: blocks that vLLM takes away must not be overwritten while they are read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pdcluster_connector.core.adapters import AdapterLoad
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.source_hold import SourceHolds
from pdcluster_connector.core.tp_mapping import target_ranks
from pdcluster_connector.ending import left_s
from pdcluster_connector.failures import TransferFailure, log_failure
from pdcluster_connector.settings import CUT_S, PushTiming
from pdcluster_connector.steps import PrefillStep, PushSlice, PushTarget
from pdcluster_connector.worker.lane import Lane
from pdcluster_connector.worker.lane_context import LaneContext
from pdcluster_connector.worker.orders import Close, Forget, GiveUp, LayerSaved, Quiesce, StepBegun, StepEnded
from pdcluster_connector.worker.resharding import Resharding, StepPush
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.params import SideChannelAddress

_CLOSE_RESHARDING_S: Final = 1.0
UNUSED_S: Final = 60.0
"""Seconds without a new request after which a lane may be retired."""


@dataclass(slots=True)
class _Sending:
    """One request: the lanes that push it, and whether its last block was ordered."""

    key: PushKey
    lanes: tuple[Lane, ...]
    is_whole: bool = False
    last_step: int = 0
    """The newest step that has a slice of the request."""


@dataclass(slots=True)
class _ForwardPass:
    """The forward pass that runs now: which lanes it feeds and which regions it has saved."""

    number: int
    is_pushing: bool = False
    """Whether the step has slices, for this rank or another one."""
    lanes: tuple[Lane, ...] = ()
    saved: set[str] = field(default_factory=set)


class PrefillWorker:
    """One prefill rank. Forward thread only."""

    def __init__(self, context: LaneContext, resharding: Resharding) -> None:
        self._context = context
        self._resharding = resharding
        self._lanes: dict[SideChannelAddress, Lane] = {}
        self._used_at: dict[SideChannelAddress, float] = {}
        self._retired: list[Lane] = []
        self._sending: dict[RequestId, _Sending] = {}
        self._holds: SourceHolds[Lane | Resharding] = SourceHolds()
        """The resharder is a reader too: it reads for other ranks even after our own pushes have ended."""
        self._unread: dict[RequestId, int] = {}
        """Ended requests, and the last step whose blocks the resharder still reads."""
        self._partial: list[_Sending] = []
        """Requests of this step for which not all lanes could be made."""
        self._released: deque[tuple[RequestId, Lane]] = deque()
        self._regions_of = _regions_by_layer(context)
        self._ranks_of: dict[tuple[int, int], list[int]] = {}
        """By decode's TP size and number of stages: the decode ranks to which this rank writes."""
        self._is_layerwise = context.settings.push is PushTiming.LAYERWISE
        self._step = _ForwardPass(0)

    def begin_step(self, step: PrefillStep) -> None:
        """Tells the lanes which blocks this forward pass completes."""
        if step.life != self._context.hello.boot_id:
            # The first step. The ranks of one engine may run on several nodes, and have no other id in common.
            self._context = self._context.of_life(step.life)
        number, now = self._step.number + 1, time.monotonic()
        pushes = [StepPush(part, self._sending_of(part, number).lanes) for part in step.slices]
        by_lane: dict[Lane, list[PushSlice]] = {}
        for push in pushes:
            for lane in push.lanes:
                by_lane.setdefault(lane, []).append(push.part)
        self._step, adapters = _ForwardPass(number, bool(pushes), tuple(by_lane)), self._adapters_of(step)
        for lane, parts in by_lane.items():
            lane.post(StepBegun(number, now, tuple(parts), adapters))
        self._give_up_partial()
        if pushes:
            self._resharding.begin_step(number, pushes)

    def layer_saved(self, layer_name: str) -> None:
        """The layer's KV is final for this step once the device has done all work that it was given so far.

        A layer that saves again (a draft layer, once for each guess) had the prompt's KV the first time.
        """
        if self._step.is_pushing and self._is_layerwise and layer_name not in self._step.saved:
            self._order(layer_name)

    def end_step(self) -> None:
        """Every region of the step is ordered, also those of layers without a hook."""
        if not self._step.is_pushing:
            return
        now = time.monotonic()
        for layer_name in self._regions_of:
            if layer_name not in self._step.saved:
                self._order(layer_name)
        for lane in self._step.lanes:
            lane.post(StepEnded(self._step.number, now))
        self._resharding.end_step()
        self._step = _ForwardPass(self._step.number)

    def protect_preempted(self, request_ids: Iterable[RequestId]) -> None:
        """No lane or resharder reads the blocks of these requests any more, or their pushes are given up.

        Waits up to ``preempt_wait_s``: the blocks are overwritten as soon as this returns. Where this rank has no lane
        left for a request, decode cannot receive it whole, and a late read of ours changes no answer.
        """
        request_ids = tuple(request_ids)
        waits = [
            (self._sending[request_id].key, lane, threading.Event())
            for request_id in request_ids
            for lane in self._reading_lanes(request_id)
        ]
        for key, lane, quiet in waits:
            lane.post(Quiesce(key, quiet))
        deadline = time.monotonic() + self._context.settings.preempt_wait_s
        is_read = not self._is_resharding(request_ids) or self._resharding.fence().wait(left_s(deadline))
        for key, lane, quiet in waits:
            if not (quiet.wait(max(0.0, deadline - time.monotonic())) and is_read):
                lane.lost.add(key)
                lane.post(GiveUp(key, "prefill preempted the request while its blocks were being read"))

    def finished(self, request_ids: Iterable[RequestId]) -> set[RequestId]:
        """Requests whose blocks vLLM may free now, each named once. ``request_ids``: those that vLLM has just ended."""
        for request_id in request_ids:
            self._finish(request_id)
        # Taken before ``_released`` is read: a lane that has ended by now has put all its releases there.
        ended = [lane for lane in self._known_lanes() if lane.is_over]
        while self._released:
            self._holds.released(*self._released.popleft())
        for lane in ended:
            self._holds.reader_ended(lane)
        self._release_read()
        free = self._holds.take_free()
        for request_id in free:
            self._forget(request_id)
        return free

    def close(self, deadline: float) -> bool:
        """End the resharder, then every lane. Returns whether none of them reads KV any more.

        Waits up to 2 s for the resharder, and until ``deadline`` (monotonic seconds) for all lanes. Pushes that are not
        over 2 s before it are cut.
        """
        is_read = self._resharding.close(min(_CLOSE_RESHARDING_S, left_s(deadline)))
        lanes, until = self._known_lanes(), deadline - CUT_S
        for lane in lanes:
            lane.post(Close(until))
        for lane in lanes:
            lane.close(until - time.monotonic())
        self._lanes.clear()
        self._retired = [lane for lane in lanes if not lane.is_over]
        return is_read and not self._retired

    def _order(self, layer_name: str) -> None:
        """Tells the step's lanes and the resharder that this layer is saved: its regions may leave once the device has
        written them."""
        self._step.saved.add(layer_name)
        regions = self._regions_of.get(layer_name)
        if regions is None:
            return
        order = LayerSaved(self._step.number, regions, self._context.device.record(), time.monotonic())
        for lane in self._step.lanes:
            lane.post(order)
        self._resharding.layer_saved(regions, order.event)

    def _sending_of(self, part: PushSlice, step: int) -> _Sending:
        sending = self._sending.get(part.request_id)
        if sending is None:
            lanes = self._lanes_for(part)
            sending = _Sending(PushKey(part.transfer_id, part.attempt), lanes)
            if len(lanes) < len(self._decode_ranks(part.target)):
                self._partial.append(sending)
            self._sending[part.request_id] = sending
            self._holds.begin(part.request_id, (*lanes, self._resharding))
        sending.is_whole, sending.last_step = part.is_last, step
        return sending

    def _give_up_partial(self) -> None:
        """Tells the lanes of the step's requests that lack a lane. Decode hears it from them, or asks at its time."""
        for sending in self._partial:
            for lane in sending.lanes:
                lane.post(GiveUp(sending.key, "prefill has no descriptor or thread for a lane to another decode rank"))
        self._partial.clear()

    def _adapters_of(self, step: PrefillStep) -> dict[RequestId, AdapterLoad]:
        """The loads of LoRA adapters with which this step computes. vLLM has loaded them before the step begins."""
        asked = {part.request_id: part.adapter for part in step.slices if part.adapter is not None}
        if not asked:
            return {}
        assert self._context.adapters is not None, "a request with an adapter on an engine without"
        return {request_id: self._context.adapters.in_step(adapter) for request_id, adapter in asked.items()}

    def _decode_ranks(self, target: PushTarget) -> list[int]:
        """The decode ranks that this rank writes to, ascending, in every stage."""
        key = (target.tp_size, target.num_stages)
        if key not in self._ranks_of:
            ours, kept = self._context.hello.layout, self._context.hello.fingerprint
            heads, has_state = kept.all_kv_heads, bool(kept.state)
            self._ranks_of[key] = target_ranks(ours.tp_rank, ours.tp_size, *key, heads, has_state=has_state)
        return self._ranks_of[key]

    def _lanes_for(self, part: PushSlice) -> tuple[Lane, ...]:
        """The lanes that exist or can be made. Where descriptors or threads are used up, the next request tries again:
        an exception would end the engine with all its requests."""
        lanes: list[Lane] = []
        problem = ""
        for rank in self._decode_ranks(part.target):
            try:
                lanes.append(self._lane(rank, part.target))
            except (OSError, RuntimeError) as error:
                cure = "raise the node's limits of processes and open files"
                problem = problem or f"prefill cannot start a lane to decode rank {rank}: {error}: {cure}"
        if problem:
            log_failure(TransferFailure.LANE_FAILED, part.request_id, part.transfer_id, part.attempt, problem)
        return tuple(lanes)

    def _lane(self, decode_rank: int, target: PushTarget) -> Lane:
        """Raises: OSError, RuntimeError: There is no descriptor, or thread, for a new one."""
        address, now = target.side_channels[decode_rank], time.monotonic()
        lane = self._lanes.get(address)
        if lane is None or not lane.is_usable:
            self._retire_stale(address, now)
            lane = self._lanes[address] = Lane(address, decode_rank, self._context, self._released.append)
        self._used_at[address] = now
        return lane

    def _retire_stale(self, address: SideChannelAddress, now: float) -> None:
        """Retires the lanes to this host and port (failed, or to an earlier life), and the lanes long unused.

        A decode engine that restarts mostly listens on another port, so only disuse shows that its lanes are stale. A
        lane that was retired too early costs its next request one handshake.
        """
        stale = [
            known
            for known, used_at in self._used_at.items()
            if (known.host, known.port) == (address.host, address.port) or now - used_at > UNUSED_S
        ]
        for known in stale:
            lane = self._lanes.pop(known)
            del self._used_at[known]
            lane.retire()
            self._retired.append(lane)
        self._free_ended_lanes()

    def _free_ended_lanes(self) -> None:
        """Frees the retired lanes whose threads have ended."""
        over = [lane for lane in self._retired if lane.is_over]
        for lane in over:
            self._holds.reader_ended(lane)
            lane.close(0)
            self._retired.remove(lane)

    def _finish(self, request_id: RequestId) -> None:
        sending = self._sending.get(request_id)
        if sending is None:
            return
        self._holds.finish(request_id)
        self._unread[request_id] = sending.last_step
        if not sending.is_whole:
            for lane in sending.lanes:
                lane.post(GiveUp(sending.key, "prefill ended before the prompt was computed"))

    def _release_read(self) -> None:
        """Releases ended requests whose blocks no resharder reads any more."""
        read_step = self._resharding.read_step
        for request_id in [known for known, step in self._unread.items() if step <= read_step]:
            del self._unread[request_id]
            self._holds.released(request_id, self._resharding)

    def _forget(self, request_id: RequestId) -> None:
        sending = self._sending.pop(request_id)
        for lane in sending.lanes:
            lane.post(Forget(sending.key))

    def _is_resharding(self, request_ids: Iterable[RequestId]) -> bool:
        """Whether our resharder, from which alone other ranks get our heads, may still read blocks of one of these."""
        steps = [self._sending[each].last_step for each in request_ids if each in self._sending]
        return any(step > self._resharding.read_step for step in steps)

    def _reading_lanes(self, request_id: RequestId) -> list[Lane]:
        """Lanes that may still read this request's blocks."""
        sending, readers = self._sending.get(request_id), self._holds.readers(request_id)
        return [lane for lane in sending.lanes if lane in readers and not lane.is_over] if sending else []

    def _known_lanes(self) -> list[Lane]:
        return [*self._lanes.values(), *self._retired]


def _regions_by_layer(context: LaneContext) -> dict[str, range]:
    """The indices of each layer's regions, which follow each other in the rank's layout."""
    spans: dict[str, range] = {}
    for index, region in enumerate(context.hello.layout.regions):
        start = spans[region.layer_name].start if region.layer_name in spans else index
        spans[region.layer_name] = range(start, index + 1)
    return spans
