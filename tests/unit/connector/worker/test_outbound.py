"""A lane's way before it is open and when it is cut: what waits for it keeps no staging memory that others want."""

from __future__ import annotations

import threading
from fractions import Fraction

import numpy as np
import pytest

from fakes.network import FakeNetwork
from patience import PATIENCE_S
from pdcluster_connector.core.link import Link
from pdcluster_connector.core.sending import Push, PushKey, PushPhase
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.reshard.feeds import ReshardItem
from pdcluster_connector.reshard.rounds import StagedPart
from pdcluster_connector.reshard.staging import StagingBuffer
from pdcluster_connector.trace import Trace
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_connector.worker.orders import Staged, StagedWrite, StepBegun, StepEnded
from pdcluster_connector.worker.outbound import Outbound
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_connector.worker.route import Route
from pdcluster_protocol.errors import TransferError
from pdcluster_protocol.ids import Attempt, RequestId, TransferId
from pdcluster_protocol.side_channel import Failed, ToDecode
from unit.connector.worker.test_route import part_of, route


class Bench:
    """A way to a decode rank that has not answered yet."""

    def __init__(self) -> None:
        self.said: list[ToDecode] = []
        self.ended: list[RequestId] = []
        self.released: list[str] = []
        self.book = PushBook(self.said.append, self.ended.append, lambda _: None, Trace(""), lambda _: None)
        self.out = Outbound(self.book, CpuDevice(), frozenset())

    def add(self, name: str) -> Push:
        push = Push(key_of(name), hold_s=3.0, deadline=600.0)
        self.book.add(LivePush(push, RequestId(name), "", 16, 0.0))
        return push

    def stage(self, name: str, at: float) -> None:
        """A part of the push ``name`` lies in staging memory."""
        item = ReshardItem(RequestId(name), 1, 0, 16, (1,), (2,), 16, 16)
        part = StagedPart(0, 0, np.zeros(1, np.int64), 0, 64)
        buffer = StagingBuffer(lambda: self.released.append(name))
        self.out.follow(Staged(1, 0, (StagedWrite(key_of(name), item, part, 0, buffer),), at), at)


def key_of(name: str) -> PushKey:
    return PushKey(TransferId(name), Attempt(1))


def test_parts_that_wait_too_long_for_the_handshake_cost_their_push_when_others_want_their_space() -> None:
    """One decode engine that never answers must not fail the pushes to all others."""
    bench = Bench()
    old, young = bench.add("old"), bench.add("young")
    bench.stage("old", 1.0)
    bench.stage("young", 5.0)
    bench.stage("old", 6.0)
    bench.out.expire(4.0, now=14.0)
    assert bench.released == ["old"]
    assert (old.phase, young.phase) == (PushPhase.STOPPED, PushPhase.OPENING)
    assert bench.ended == ["old"]
    (failed,) = bench.said
    assert isinstance(failed, Failed)
    assert "staging memory for too long: decode is slow or does not answer" in failed.reason


def test_the_part_of_a_push_that_is_over_is_let_go_too() -> None:
    bench = Bench()
    bench.stage("gone", 1.0)
    bench.out.expire(4.0, now=14.0)
    assert bench.released == ["gone"]
    assert bench.said == []


def test_what_was_let_go_is_not_let_go_again_and_the_rest_of_the_backlog_stays() -> None:
    bench = Bench()
    bench.add("old")
    bench.stage("old", 1.0)
    bench.out.follow(StepEnded(1, 1.0), 1.0)
    bench.stage("old", 5.0)
    for _ in range(2):
        bench.out.expire(4.0, now=14.0)
    assert bench.released == ["old"]
    bench.out.drop_backlog()
    assert bench.released == ["old", "old"]


def test_a_session_that_has_opened_when_its_lane_ends_is_closed_unused() -> None:
    bench, network, has_opened = Bench(), FakeNetwork(), threading.Event()
    session = network.join()
    nowhere = Route(Link((), (), Fraction(0)), {}, {}, 0, StepEnded, {})
    bench.out.open(nowhere, "", Sessions(lambda: session), has_opened.set)
    assert has_opened.wait(PATIENCE_S)
    assert bench.out.close()
    with pytest.raises(TransferError, match="closed"):
        session.submit_writes("", [(0, 0, 1)])


def test_a_way_that_is_cut_gives_back_the_buffers_of_the_parts_that_it_had_still_to_write() -> None:
    bench, has_opened = Bench(), threading.Event()
    bench.add("r")
    bench.out.open(route(2, 1), "", Sessions(FakeNetwork().join), has_opened.set)
    assert has_opened.wait(PATIENCE_S)
    assert bench.out.enter()
    bench.out.follow(StepBegun(1, 0.0, (part_of("r", 16),)), 0.0)
    bench.stage("r", 1.0)
    assert bench.released == []
    assert bench.out.close()
    assert bench.released == ["r"]
