"""A lane's writes over the fake transport: order, holding for a grant, failure, and loss."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fakes.device import ManualDevice
from fakes.network import FakeNetwork
from fakes.transports import FirstNeverEnds, Wrapped
from pdcluster_connector.core.pace import SHORTEST_LOOK_S
from pdcluster_connector.core.ranges import CopyShape, Grid, GroupSlice, plan_ranges
from pdcluster_connector.core.sending import CutLane, Push, PushKey, PushPhase, Send
from pdcluster_connector.core.tp_mapping import WHOLE
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.reshard.staging import StagingBuffer
from pdcluster_connector.settings import MAX_WRITES_IN_FLIGHT
from pdcluster_connector.transport.base import WriteId, WriteStatus
from pdcluster_connector.worker.batches import Batch, LayerRecord, Part
from pdcluster_connector.worker.writes import WriteQueue
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.side_channel import Done, Failed, ToDecode

BLOCK = 64


class Bench:
    """One push of ``num_blocks`` scattered blocks over a fake network."""

    def __init__(self, num_blocks: int = 3, *, is_staged: bool = False, writes_per_submit: int = 1) -> None:
        self.num_released = 0
        self.network = FakeNetwork(writes_per_submit)
        sender, receiver = self.network.join(), self.network.join()
        self.source = np.arange(4096 * BLOCK, dtype=np.uint32).view(np.uint8)
        self.target = np.zeros(4096 * BLOCK * 4, np.uint8)
        sender.register(self.source.ctypes.data, self.source.nbytes)
        receiver.register(self.target.ctypes.data, self.target.nbytes)
        self.lost: set[PushKey] = set()
        self.sender = sender
        self.queue = WriteQueue(sender, CpuDevice(), receiver.session, self.lost)
        self.is_staged = is_staged
        self.blocks: list[int] = []
        self.push = self.add_push("t", num_blocks)
        self.said: list[ToDecode] = []
        self.num_cuts = 0

    def add_push(self, name: str, num_blocks: int) -> Push:
        """One more push of scattered blocks, behind those of the pushes before it."""
        push = Push(PushKey(TransferId(name), Attempt(1)), hold_s=30.0, deadline=60.0)
        first = 1 + 2 * len(self.blocks)
        blocks = list(range(first, first + 2 * num_blocks, 2))
        self.blocks += blocks
        grid = Grid(1, BLOCK, 1, BLOCK, 0, BLOCK, 0)
        shape = CopyShape(0, grid, grid, 1, 1, 1, BLOCK, WHOLE)
        ranges = plan_ranges(shape, GroupSlice(0, num_blocks, blocks, blocks))
        record = LayerRecord(1, 0, 0.0, ranges.total_bytes, unacked_bytes=ranges.total_bytes)
        buffer = StagingBuffer(self._count_release) if self.is_staged else None
        part = Part(push, ranges, self.source.ctypes.data, self.target.ctypes.data, record, buffer)
        push.plan(ranges.total_bytes, 1, is_last=True)
        self.queue.add(Batch(None, (part,)))
        return push

    def _count_release(self) -> None:
        self.num_released += 1

    def advance(self, now: float = 1.0) -> None:
        for _, commands in self.queue.advance(now=now):
            self.said += [command.message for command in commands if isinstance(command, Send)]
            self.num_cuts += sum(isinstance(command, CutLane) for command in commands)

    def grant(self) -> None:
        self.push.grant(9.0, now=0.0)
        self.queue.granted(self.push)

    def has_landed(self) -> bool:
        return all(
            ctypes.string_at(self.target.ctypes.data + block * BLOCK, BLOCK)
            == ctypes.string_at(self.source.ctypes.data + block * BLOCK, BLOCK)
            for block in self.blocks
        )


def test_nothing_leaves_before_the_grant_and_everything_after_it() -> None:
    bench = Bench()
    bench.advance()
    assert not bench.target.any()
    assert bench.queue.has_work_of(bench.push)
    bench.grant()
    bench.advance()
    bench.advance()
    assert bench.has_landed()
    assert [type(message) for message in bench.said] == [Done]
    assert not bench.queue.has_work_of(bench.push)


def test_a_failed_write_is_never_done_and_asks_for_a_cut() -> None:
    bench = Bench()
    bench.network.fail_next()
    bench.grant()
    bench.advance()
    bench.advance()
    assert [type(message) for message in bench.said] == [Failed]
    assert bench.push.phase is PushPhase.STOPPING
    assert bench.num_cuts == 1


class LosesWrites(Wrapped):
    """Mooncake gives an answer that is not known: the write may be under way for ever."""

    def write_status(self, write: WriteId) -> WriteStatus:
        super().write_status(write)
        return WriteStatus.LOST


def test_a_lost_write_is_never_done_asks_for_a_cut_and_keeps_its_buffer_until_the_session_is_closed() -> None:
    bench = Bench(num_blocks=1, is_staged=True)
    bench.queue.transport = LosesWrites(bench.sender)
    bench.grant()
    bench.advance()
    bench.advance()
    assert [type(message) for message in bench.said] == [Failed]
    assert bench.push.phase is PushPhase.STOPPING
    assert (bench.num_cuts, bench.num_released) == (1, 0)
    bench.queue.close()
    assert bench.num_released == 1


def test_a_push_whose_source_was_overwritten_says_failed_even_if_every_write_is_acknowledged() -> None:
    bench = Bench()
    bench.grant()
    bench.network.hold()
    bench.advance()
    bench.lost.add(bench.push.key)
    bench.network.release()
    bench.advance()
    bench.advance()
    assert type(bench.said[0]) is Failed
    assert not any(isinstance(message, Done) for message in bench.said)


def test_a_write_that_never_ends_does_not_hide_those_behind_it_once_its_push_has_stopped() -> None:
    bench = Bench(num_blocks=1)
    bench.queue.transport = FirstNeverEnds(bench.sender)
    other = bench.add_push("u", 1)
    for push in (bench.push, other):
        push.grant(9.0, now=0.0)
    bench.advance(1.0)
    bench.advance(1.5)
    assert other.phase is not PushPhase.DONE, "submits end in order while all is well"
    bench.push.revoke(now=2.0)
    bench.advance(2.0)
    assert (bench.push.phase, other.phase) == (PushPhase.STOPPING, PushPhase.DONE)


def two_pushes_in_one_submit(*, is_staged: bool = False) -> tuple[Bench, Push]:
    """Granted, with three writes each, where a submit takes four; nothing has left."""
    bench = Bench(is_staged=is_staged, writes_per_submit=4)
    other = bench.add_push("u", 3)
    other.grant(9.0, now=0.0)
    bench.push.grant(9.0, now=0.0)
    bench.network.hold()
    return bench, other


def test_requests_share_submits_and_each_is_done_with_its_own_last_write() -> None:
    bench, other = two_pushes_in_one_submit()
    bench.advance()
    assert [flight.num_writes for flight in bench.queue._in_flight] == [4, 2]
    bench.network.release(1)
    bench.advance()
    assert [message.transfer_id for message in bench.said if isinstance(message, Done)] == ["t"]
    bench.network.release()
    bench.advance()
    assert [message.transfer_id for message in bench.said if isinstance(message, Done)] == ["t", "u"]
    assert other.phase is PushPhase.DONE
    assert bench.has_landed()


def test_requests_of_a_failed_submit_are_all_failed_and_none_is_called_clean() -> None:
    bench, other = two_pushes_in_one_submit(is_staged=True)
    bench.network.fail_next()
    bench.advance()
    bench.network.release()
    bench.advance()
    assert [type(message) for message in bench.said] == [Failed, Failed]
    assert (bench.push.phase, other.phase) == (PushPhase.STOPPING, PushPhase.STOPPING)
    assert (bench.num_cuts, bench.num_released) == (2, 0)
    bench.queue.close()
    assert bench.num_released == 2


def test_a_request_that_stops_is_fenced_when_the_submit_that_it_shares_is_over_and_the_other_goes_on() -> None:
    bench, other = two_pushes_in_one_submit(is_staged=True)
    bench.advance()
    bench.push.revoke(now=1.0)
    bench.advance()
    assert (bench.push.phase, bench.num_released) == (PushPhase.STOPPING, 0)
    bench.network.release()
    bench.advance()
    assert (bench.push.phase, other.phase) == (PushPhase.STOPPED, PushPhase.DONE)
    assert bench.num_released == 2


def test_requests_of_a_refused_submit_give_up_with_nothing_in_flight() -> None:
    bench, other = two_pushes_in_one_submit(is_staged=True)
    bench.sender.close()
    bench.advance()
    assert {type(message) for message in bench.said} == {Failed}
    assert all(isinstance(message, Failed) and message.is_fenced for message in bench.said)
    assert (bench.push.phase, other.phase) == (PushPhase.STOPPED, PushPhase.STOPPED)
    assert (bench.num_released, bench.num_cuts) == (2, 0)


@pytest.mark.parametrize("is_granted", [False, True])
def test_what_a_stopped_push_still_had_queued_never_leaves(is_granted: bool) -> None:
    bench = Bench()
    if is_granted:
        bench.grant()
    else:
        bench.advance()
    bench.push.give_up("stopped", now=1.0)
    bench.queue.forget_stopped()
    bench.advance()
    bench.advance()
    assert not bench.target.any()
    assert not bench.queue.has_work_of(bench.push)


def test_staging_memory_comes_back_once_with_the_last_acknowledgement() -> None:
    bench = Bench(is_staged=True)
    bench.network.hold()
    bench.grant()
    bench.advance()
    bench.network.release(2)
    bench.advance()
    assert bench.num_released == 0
    bench.network.release()
    bench.advance()
    assert bench.num_released == 1
    bench.queue.close()
    assert bench.num_released == 1


def test_staging_memory_of_a_push_that_stops_comes_back_when_its_last_write_in_flight_has_ended() -> None:
    bench = Bench(num_blocks=MAX_WRITES_IN_FLIGHT + 5, is_staged=True)
    bench.network.hold()
    bench.grant()
    bench.advance()
    bench.push.revoke(now=1.0)
    bench.network.release(MAX_WRITES_IN_FLIGHT - 1)
    bench.advance()
    assert bench.num_released == 0
    bench.network.release()
    bench.advance()
    assert bench.num_released == 1
    assert bench.push.phase is PushPhase.STOPPED


@pytest.mark.parametrize("ends", ["revoke", "unneeded", "give up"])
def test_staging_memory_held_for_a_grant_that_does_not_come_is_given_back(ends: str) -> None:
    bench = Bench(is_staged=True)
    bench.advance()
    match ends:
        case "revoke":
            bench.push.revoke(now=1.0)
        case "unneeded":
            bench.push.unneeded()
        case _:
            bench.push.give_up("reason", now=1.0)
    assert bench.num_released == 0
    bench.queue.forget_stopped()
    assert bench.num_released == 1
    bench.queue.close()
    assert bench.num_released == 1


def test_staging_memory_of_a_failed_write_comes_back_only_when_the_session_is_closed() -> None:
    """An error does not mean that the transport has stopped reading."""
    bench = Bench(is_staged=True)
    bench.network.fail_next()
    bench.grant()
    bench.advance()
    bench.advance()
    assert bench.num_cuts == 1
    assert bench.num_released == 0
    bench.queue.close()
    assert bench.num_released == 1


@pytest.mark.parametrize("is_granted", [False, True])
def test_staging_memory_of_what_was_never_submitted_comes_back_with_the_session(*, is_granted: bool) -> None:
    bench = Bench(is_staged=True)
    if is_granted:
        bench.network.hold()
        bench.grant()
        bench.advance()
    bench.queue.close()
    bench.queue.close()
    assert bench.num_released == 1


def test_a_staged_copy_does_not_keep_the_blocks_of_its_request_busy() -> None:
    """What a preemption takes away are the blocks, which were read when the copy was made."""
    bench = Bench(is_staged=True)
    assert not bench.queue.has_work_of(bench.push)
    bench.advance()
    assert not bench.queue.has_work_of(bench.push)


def test_pushes_that_keep_staging_memory_for_long_are_known_until_it_comes_back() -> None:
    bench = Bench(is_staged=True)
    bench.advance()
    assert bench.queue.staged_since(-0.1) == []
    assert bench.queue.staged_since(0.0) == [bench.push]
    bench.grant()
    bench.advance()
    bench.advance()
    assert bench.queue.staged_since(9.0) == []


def test_a_buffer_with_two_holders_comes_back_once_both_have_let_go() -> None:
    released: list[str] = []
    buffer = StagingBuffer(lambda: released.append("back"), 2)
    buffer.release()
    assert released == []
    buffer.release()
    assert released == ["back"]
    with pytest.raises(AssertionError, match="more often"):
        buffer.release()


@pytest.mark.parametrize(("num_writes", "write_s"), [(40, 0.004), (3, 0.005)])
def test_a_lane_looks_at_its_writes_as_often_as_their_link_needs(num_writes: int, write_s: float) -> None:
    bench = Bench(num_writes)
    bench.grant()
    bench.network.hold()
    now, num_looks, num_ended = 1.0, 0, 0
    bench.advance(now)
    while bench.queue.is_busy:
        now, num_looks = now + bench.queue.next_look_s, num_looks + 1
        num_due = min(int((now - 1.0) / write_s + 1e-6), num_writes)
        bench.network.release(num_due - num_ended)
        num_ended = num_due
        bench.advance(now)
    assert now - (1.0 + num_writes * write_s) <= write_s / 2 + SHORTEST_LOOK_S, "the last end is seen late"
    to_learn_the_pace = write_s / SHORTEST_LOOK_S
    assert num_looks <= num_writes + to_learn_the_pace + 4


@pytest.mark.parametrize(("layer_s", "looks_a_layer"), [(0.0002, 1), (0.004, 3), (0.010, 4), (1.0, 127)])
def test_a_lane_looks_at_the_device_as_often_as_its_layers_need(layer_s: float, looks_a_layer: int) -> None:
    """An accelerator's layers are all announced at once, and end one by one."""
    bench, device, now, num_looks = Bench(), ManualDevice(), 0.0, 0
    bench.queue.device = device
    bench.advance(now)
    for _ in range(32):
        bench.queue.add(Batch(device.record(), ()))
    while bench.queue.is_busy:
        now, num_looks = now + bench.queue.next_look_s, num_looks + 1
        for event in device.events[: int(now / layer_s)]:
            event.complete()
        bench.advance(now)
    to_learn_the_pace = layer_s / SHORTEST_LOOK_S
    assert num_looks <= 32 * looks_a_layer + to_learn_the_pace
    assert now - 32 * layer_s <= max(0.001, layer_s / 2 + 0.001)
