"""Small strips of a lane over the fake transport: gathered buffer by buffer, and no buffer comes back before it may."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes.device import ManualDevice, ManualEvent
from fakes.network import FakeNetwork
from fakes.transports import FirstNeverEnds
from pdcluster_connector.core.gathering import plan_gathers
from pdcluster_connector.core.pace import SHORTEST_LOOK_S
from pdcluster_connector.core.ranges import ByteRanges, CopyShape, Grid, GroupSlice, plan_ranges
from pdcluster_connector.core.sending import CutLane, Push, PushKey, Send
from pdcluster_connector.core.tp_mapping import WHOLE
from pdcluster_connector.device import CpuDevice, Device, DeviceEvent, NoStream, Stream
from pdcluster_connector.reshard import StagingMemory, StripGatherer, StripStaging
from pdcluster_connector.worker.batches import Batch, LayerRecord, Part
from pdcluster_connector.worker.writes import WriteQueue
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.side_channel import Done, Failed, ToDecode

STRIP = 64
BLOCK = 2 * STRIP
NUM_BLOCKS = 400
SHAPE = CopyShape(
    0, Grid(1, BLOCK, 1, BLOCK, STRIP, STRIP, STRIP), Grid(1, STRIP, 1, STRIP, STRIP, STRIP, 0), 1, 1, 1, STRIP, WHOLE
)
"""Prefill's blocks have two strips, of which the second is decode's block."""


class _ManualStream(NoStream):
    def __init__(self, device: ManualDevice) -> None:
        super().__init__()
        self._device = device

    def record_event(self) -> ManualEvent:
        event = self._device.record()
        assert isinstance(event, ManualEvent)
        return event


class CopiesLate(ManualDevice):
    """A copy is over when the test says so."""

    def open_stream(self, device: torch.device) -> Stream:
        return _ManualStream(self)


class Bench:
    """One rank's staging memory, and lanes of it."""

    def __init__(self, num_buffers: float, device: Device | None = None, writes_per_submit: int = 1) -> None:
        self.device = device or CpuDevice()
        self.network = FakeNetwork(writes_per_submit)
        self.source = np.random.default_rng(3).integers(1, 256, NUM_BLOCKS * BLOCK, np.uint8)
        memory = StagingMemory(int(num_buffers * BUFFER), torch.device("cpu"))
        self.staging = StripStaging(memory, {0: torch.from_numpy(self.source)}, self.device)
        self.lanes = [Lane(self), Lane(self)]


BUFFER = 16 * STRIP
"""What one gather takes here."""


class Lane:
    """A lane's queue, to a decode rank of its own."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        sender, receiver = bench.network.join(), bench.network.join()
        self.target = np.zeros(NUM_BLOCKS * STRIP, np.uint8)
        sender.register(bench.source.ctypes.data, bench.source.nbytes)
        sender.register(*bench.staging.memory.span)
        receiver.register(self.target.ctypes.data, self.target.nbytes)
        gatherer = StripGatherer(bench.staging)
        self.sender = sender
        self.queue = WriteQueue(sender, bench.device, receiver.session, set(), gatherer)
        self.said: list[ToDecode] = []
        self.num_cuts = 0
        self.planned: list[ByteRanges] = []

    def push(self, first: int, count: int) -> Push:
        """One push of blocks ``first + 1, first, first + 3 ...`` to their neighbours on decode, granted."""
        push = Push(PushKey(TransferId(f"from {first}"), Attempt(1)), hold_s=30.0, deadline=60.0)
        theirs = list(range(first, first + count))
        ours = [block ^ 1 for block in theirs]
        ranges = plan_ranges(SHAPE, GroupSlice(0, count, ours, theirs))
        gathers = plan_gathers(SHAPE, ranges, BUFFER)
        assert gathers, "nothing to gather"
        self.planned.append(ranges)
        record = LayerRecord(1, 0, 0.0, ranges.total_bytes, unacked_bytes=ranges.total_bytes)
        bases = self.bench.source.ctypes.data, self.target.ctypes.data
        push.plan(ranges.total_bytes, 1, is_last=True)
        self.queue.add(Batch(None, (Part(push, ranges, *bases, record, gathers=gathers),)))
        push.grant(9.0, now=0.0)
        return push

    def advance(self, times: int = 1, now: float = 1.0) -> None:
        for _ in range(times):
            for _, commands in self.queue.advance(now=now):
                self.said += [command.message for command in commands if isinstance(command, Send)]
                self.num_cuts += sum(isinstance(command, CutLane) for command in commands)

    def require_landed(self) -> None:
        wanted = np.zeros_like(self.target)
        for ranges in self.planned:
            for start, to in zip(ranges.source, ranges.target, strict=True):
                wanted[to : to + STRIP] = self.bench.source[start : start + STRIP]
        assert np.array_equal(self.target, wanted)
        assert [type(message) for message in self.said] == [Done] * len(self.planned)

    @property
    def num_in_flight(self) -> int:
        return self.queue._num_writes_in_flight


def test_strips_leave_gathered_and_every_buffer_comes_back() -> None:
    bench = Bench(num_buffers=8)
    (lane, _) = bench.lanes
    bench.network.hold()
    lane.push(10, 40)
    lane.advance()
    assert lane.num_in_flight == 3, "a write for each buffer of neighbours"
    assert not bench.staging.is_idle
    bench.network.release()
    lane.advance(2)
    lane.require_landed()
    assert bench.staging.is_idle


def test_a_lane_waits_for_a_buffer_of_its_own_and_no_buffer_is_used_before_it_was_read() -> None:
    bench = Bench(num_buffers=2)
    (lane, _) = bench.lanes
    bench.network.hold()
    lane.push(10, 160)
    for _ in range(5):
        lane.advance()
        assert lane.num_in_flight == 2, "all buffers are still read"
    bench.network.release()
    lane.advance(12)
    lane.require_landed()
    assert bench.staging.is_idle


def test_a_lane_never_waits_for_the_buffers_of_another() -> None:
    bench = Bench(num_buffers=2)
    silent, lane = bench.lanes
    silent.queue.transport = FirstNeverEnds(silent.sender)
    silent.push(10, 32)
    bench.network.hold()
    silent.advance()
    lane.push(50, 40)
    lane.advance()
    assert lane.num_in_flight == 40, "strips as they are"
    bench.network.release()
    lane.advance(2)
    lane.require_landed()


def test_a_part_that_waits_for_space_gets_it_before_those_behind_it() -> None:
    """Else a small part could keep the space that the one before it wants, and both would wait for ever."""
    bench = Bench(num_buffers=1.25)
    (lane, _) = bench.lanes
    bench.network.hold()
    for first, count in ((10, 8), (30, 16), (60, 8)):
        lane.push(first, count)
    lane.advance()
    assert lane.num_in_flight == 1
    bench.network.release()
    lane.advance(8)
    lane.require_landed()


def test_blocks_are_read_until_they_were_copied_and_not_beyond() -> None:
    device = CopiesLate()
    bench = Bench(8, device)
    (lane, _) = bench.lanes
    bench.network.hold()
    push = lane.push(10, 64)
    lane.advance()
    assert (len(device.events), lane.num_in_flight) == (4, 0)
    for event in device.events[:3]:
        event.complete()
    lane.advance()
    assert lane.queue.has_work_of(push)
    device.events[3].complete()
    lane.advance()
    assert lane.num_in_flight == 4
    assert not lane.queue.has_work_of(push), "writes read the buffer, not the blocks"


def test_nothing_leaves_before_it_was_copied_and_the_next_copies_run_meanwhile() -> None:
    device = CopiesLate()
    bench = Bench(8, device)
    (lane, _) = bench.lanes
    push = lane.push(10, 100)
    lane.advance()
    assert (len(device.events), lane.num_in_flight) == (4, 0)
    assert lane.queue.has_work_of(push), "its blocks are still read"
    assert lane.queue.next_look_s == SHORTEST_LOOK_S
    bench.network.hold()
    device.events[0].complete()
    lane.advance()
    assert lane.num_in_flight == 1
    bench.network.release()
    while not lane.said:
        for event in device.events:
            event.complete()
        lane.advance()
        assert len(device.events) <= 7
    lane.require_landed()
    assert not lane.queue.has_work_of(push)
    assert bench.staging.is_idle


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_buffer_whose_copy_is_under_way_is_not_used_again_although_nobody_wants_it(*, is_cut: bool) -> None:
    device = CopiesLate()
    bench = Bench(4, device)
    stopped, lane = bench.lanes
    push = stopped.push(10, 64)
    stopped.advance()
    assert len(device.events) == 4
    push.give_up("the test", now=1.0)
    if is_cut:
        stopped.queue.close()
    else:
        stopped.advance()
    lane.push(80, 64)
    lane.advance()
    assert len(device.events) == 4, "a buffer is filled twice at once"
    assert not bench.staging.is_idle
    for event in device.events:
        event.complete()
    lane.advance(2)
    lane.require_landed()
    assert bench.staging.is_idle


def test_a_failed_write_keeps_its_buffer_until_the_session_is_closed_and_the_others_come_back() -> None:
    bench = Bench(num_buffers=8)
    (lane, _) = bench.lanes
    bench.network.fail_next()
    lane.push(10, 64)
    lane.advance(4)
    assert [type(message) for message in lane.said] == [Failed]
    assert lane.num_cuts == 1
    assert bench.staging.memory.take_now(7 * BUFFER) is not None
    assert bench.staging.memory.take_now(2 * BUFFER) is None
    lane.queue.close()
    assert bench.staging.memory.take_now(BUFFER) is not None


def test_a_layer_that_is_held_for_its_grant_takes_no_space() -> None:
    bench = Bench(num_buffers=8)
    (lane, _) = bench.lanes
    push = Push(PushKey(TransferId("held"), Attempt(1)), hold_s=30.0, deadline=60.0)
    ranges = plan_ranges(SHAPE, GroupSlice(0, 16, list(range(16, 0, -1)), list(range(1, 17))))
    record = LayerRecord(1, 0, 0.0, ranges.total_bytes, unacked_bytes=ranges.total_bytes)
    bases = bench.source.ctypes.data, lane.target.ctypes.data
    push.plan(ranges.total_bytes, 1, is_last=True)
    lane.queue.add(Batch(None, (Part(push, ranges, *bases, record, gathers=plan_gathers(SHAPE, ranges)),)))
    lane.advance(2)
    assert bench.staging.is_idle
    assert lane.queue.has_work_of(push)
    lane.planned.append(ranges)
    push.grant(9.0, now=0.0)
    lane.queue.granted(push)
    lane.advance(2)
    lane.require_landed()


def test_a_broken_device_gives_no_space_back() -> None:
    class Broken(CopiesLate):
        is_broken = False

        def is_done(self, event: object) -> bool:
            if self.is_broken:
                raise RuntimeError("device-side assert")
            return super().is_done(event)  # type: ignore[arg-type]  # what it recorded itself

    device = Broken()
    bench = Bench(4, device)
    (lane, _) = bench.lanes
    lane.push(10, 16)
    lane.advance()
    device.is_broken = True
    lane.queue.close()
    assert not bench.staging.is_idle


class TellsOfOneCopy(CopiesLate):
    """The first question about the copy ``number`` raises, as a question to an accelerator may."""

    number: int | None = None

    def is_done(self, event: DeviceEvent) -> bool:
        if self.number is not None and event is self.events[self.number]:
            self.number = None
            raise RuntimeError("an illegal memory access was encountered")
        return super().is_done(event)


def test_a_buffer_that_was_taken_when_the_device_told_of_another_ones_copy_comes_back() -> None:
    device = TellsOfOneCopy()
    bench = Bench(2, device, writes_per_submit=64)
    lane = bench.lanes[0]
    pushes = [lane.push(2, 16), lane.push(32, 16)]
    lane.advance()
    device.events[0].complete()
    device.number = 1
    with pytest.raises(RuntimeError, match="illegal memory"):
        lane.advance()
    for push in pushes:
        push.give_up("the device has failed", now=1.0)
    lane.queue.drop_queued()
    device.events[1].complete()
    assert bench.staging.is_idle
