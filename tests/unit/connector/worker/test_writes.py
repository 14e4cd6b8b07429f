"""A lane's writes over the fake transport: order, holding for a grant, failure, and loss."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pdcluster_connector.core.ranges import CopyShape, Grid, GroupSlice, plan_ranges
from pdcluster_connector.core.sending import Cut, Phase, Push, PushKey, Send
from pdcluster_connector.core.tp_mapping import WHOLE
from pdcluster_connector.transport.fake import FakeNetwork
from pdcluster_connector.worker.device import CpuDevice
from pdcluster_connector.worker.writes import MAX_WRITES_IN_FLIGHT, Batch, LayerRecord, Part, WriteQueue
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.side_channel import Done, Failed, ToDecode

BLOCK = 64


class Bench:
    """One push of ``num_blocks`` scattered blocks over a fake network."""

    def __init__(self, num_blocks: int = 3) -> None:
        self.network = FakeNetwork()
        sender, receiver = self.network.join(), self.network.join()
        self.source = np.arange(4096 * BLOCK, dtype=np.uint32).view(np.uint8)
        self.target = np.zeros(4096 * BLOCK * 4, np.uint8)
        sender.register(self.source.ctypes.data, self.source.nbytes)
        receiver.register(self.target.ctypes.data, self.target.nbytes)
        self.lost: set[PushKey] = set()
        self.queue = WriteQueue(sender, CpuDevice(), receiver.session, self.lost)
        self.push = Push(PushKey(TransferId("t"), Attempt(1)), hold_s=30.0, deadline=60.0)
        self.blocks = list(range(1, 1 + 2 * num_blocks, 2))
        grid = Grid(1, BLOCK, 1, BLOCK, 0, BLOCK, 0)
        shape = CopyShape(0, grid, grid, 1, 1, 1, BLOCK, WHOLE)
        ranges = plan_ranges(shape, GroupSlice(0, num_blocks, self.blocks, self.blocks))
        record = LayerRecord(1, 0, 0.0, ranges.total_bytes, unacked_bytes=ranges.total_bytes)
        part = Part(self.push, ranges, self.source.ctypes.data, self.target.ctypes.data, record)
        self.push.plan(ranges.total_bytes, 1, is_last=True)
        self.queue.add(Batch(None, (part,)))
        self.said: list[ToDecode] = []
        self.num_cuts = 0

    def advance(self, now: float = 1.0) -> None:
        for _, commands in self.queue.advance(now=now):
            self.said += [command.message for command in commands if isinstance(command, Send)]
            self.num_cuts += sum(isinstance(command, Cut) for command in commands)

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
    assert bench.push.phase is Phase.STOPPING
    assert bench.num_cuts == 1


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


def test_writes_in_flight_are_bounded_and_all_arrive() -> None:
    bench = Bench(num_blocks=MAX_WRITES_IN_FLIGHT + 100)
    bench.grant()
    bench.network.hold()
    bench.advance()
    assert len(bench.queue._in_flight) == MAX_WRITES_IN_FLIGHT
    bench.network.release()
    for _ in range(3):
        bench.advance()
    assert bench.has_landed()


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
