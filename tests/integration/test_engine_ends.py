"""The end of an engine's parts: by one deadline, whatever blocks, and with a true word on what may still be read."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
import torch.distributed as dist

from fakes.transports import Wrapped
from integration.ranks import Cache, Shape, engine_facts, expect, fingerprint_of, make_pair
from integration.test_lane_ends import granted_push
from integration.test_resharder import lone_resharder
from patience import EDGE_S
from pdcluster_connector import ending
from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.assembly import PrefillRank, make_decode_rank
from pdcluster_connector.core.adapters import AdapterLoad, AdapterRequest
from pdcluster_connector.ending import END_S, end_parts
from pdcluster_connector.settings import CUT_S, SessionUse, Settings
from pdcluster_connector.steps import DecodeStep
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.transport.shared import SharedSessions
from pdcluster_connector.worker.orders import Close
from pdcluster_protocol.labels import Role

if TYPE_CHECKING:
    from pdcluster_connector.transport.sessions import Sessions
    from pdcluster_connector.worker.prefill import PrefillWorker

PASSED = 0.0
"""A deadline that has passed."""


class _ClosesInHalfASecond(Wrapped):
    def close(self) -> None:
        time.sleep(0.5)
        super().close()


def test_closing_waits_for_the_lanes() -> None:
    """vLLM frees the KV cache as soon as this returns."""
    with granted_push(_ClosesInHalfASecond) as (worker, _):
        assert worker.close(time.monotonic() + END_S)
        assert [t.name for t in threading.enumerate() if t.name.startswith("pdcluster-lane")] == []


class _SlowLane:
    """It ends late."""

    is_over = True

    def __init__(self) -> None:
        self.deadline, self.timeout_s = 0.0, 0.0

    def post(self, order: Close) -> None:
        self.deadline = order.deadline

    def close(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        time.sleep(0.1)


def test_all_lanes_end_by_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine ends within seconds, with however many decode engines."""
    with granted_push(Wrapped) as (worker, _):
        (real,), lanes = worker._known_lanes(), [_SlowLane() for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(worker, "_known_lanes", lambda: lanes)
            deadline = time.monotonic() + END_S
            assert worker.close(deadline)
        real.close(0)
    assert {lane.deadline for lane in lanes} == {deadline - CUT_S}
    first, second, third = (lane.timeout_s for lane in lanes)
    assert first > second > third


class _Gated(Wrapped):
    """Closing blocks until the gate is open."""

    def __init__(self, inner: Transport, gate: threading.Event) -> None:
        super().__init__(inner)
        self._gate = gate

    def close(self) -> None:
        assert self._gate.wait(EDGE_S)
        super().close()


def test_a_lane_whose_session_does_not_close_is_left_at_the_deadline_and_not_called_over() -> None:
    gate = threading.Event()
    with granted_push(lambda inner: _Gated(inner, gate)) as (worker, _):
        assert not worker.close(PASSED)
        assert not worker.close(PASSED), "it does not end by being asked twice"
        gate.set()
        assert worker.close(time.monotonic() + EDGE_S)


class _Unclosable(Wrapped):
    def close(self) -> None:
        raise RuntimeError("the library gave up")


def test_a_lane_whose_session_cannot_be_closed_is_not_called_over_though_its_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has written may still read the KV cache."""
    monkeypatch.setattr("os.kill", lambda *_: None)
    with granted_push(_Unclosable) as (worker, _):
        assert not worker.close(time.monotonic() + EDGE_S)
        assert not any(thread.name.startswith("pdcluster-lane") for thread in threading.enumerate())
        assert not worker.close(PASSED)
    ending._kept.clear()


class _Hanging(AdapterLoads):
    """Its files lie on a file system that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.gate = threading.Event(), threading.Event()

    def at_hand(self, asked: AdapterRequest) -> AdapterLoad:
        self.is_asked.set()
        assert self.gate.wait(EDGE_S)
        return super().at_hand(asked)


def test_a_receiver_whose_thread_hangs_is_left_at_the_deadline_and_not_called_over() -> None:
    shape, loads = Shape(), _Hanging()
    facts, memory = engine_facts(Role.DECODE, shape, Settings()), Cache(shape).memory(fingerprint_of(shape))
    rank = make_decode_rank(facts, memory, adapters=loads)
    news = msgspec.structs.replace(expect("r", 1, 20_000), adapter=AdapterRequest(1, "sql", "/nowhere", "use"))
    rank.worker.begin_step(DecodeStep(expects=(news,)))
    assert loads.is_asked.wait(EDGE_S)
    assert not rank.close(time.monotonic() + 2 * CUT_S), "its sessions are closed by then"
    loads.gate.set()
    assert rank.close(time.monotonic() + EDGE_S)
    assert loads.close(time.monotonic() + EDGE_S)


@dataclass
class _Noted:
    """A worker or sessions: notes its deadline."""

    is_over: bool = True
    deadlines: list[float] = field(default_factory=list)

    def close(self, deadline: float) -> bool:
        self.deadlines.append(deadline)
        return self.is_over


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("are_closed", [True, False])
def test_prefills_sessions_have_their_part_of_the_time_and_are_closed_whatever_became_of_the_lanes(
    *, is_over: bool, are_closed: bool
) -> None:
    worker, sessions = _Noted(is_over), _Noted(are_closed)
    rank = PrefillRank(cast("PrefillWorker", worker), cast("Sessions", sessions))
    assert rank.close(100.0) is (is_over and are_closed)
    assert (worker.deadlines, sessions.deadlines) == ([100.0 - CUT_S], [100.0])


class _BlockedGroup:
    """A group of which this rank cannot take leave."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def abort(self) -> None:
        assert self.gate.wait(EDGE_S)


def test_a_resharder_whose_group_does_not_let_it_go_is_left_and_not_called_over() -> None:
    group, may_end = _BlockedGroup(), threading.Event()
    resharder = lone_resharder(lambda _: may_end.wait(EDGE_S))
    resharder._group = cast("dist.ProcessGroup", group)
    resharder.end_step()
    assert not resharder.close(0.0)
    may_end.set()
    group.gate.set()
    assert resharder.close(EDGE_S)


def test_an_engine_ends_by_its_deadline_while_a_shared_session_does_not_close() -> None:
    """As with Ascend. Nothing is called closed, so that its memory is kept."""
    with make_pair(settings=Settings(sessions=SessionUse.SHARED)) as pair:
        engines = [pair.prefill.sessions, pair.decode.worker._sessions._sessions]
        gate = threading.Event()
        for sessions in engines:
            assert isinstance(sessions, SharedSessions)
            sessions._engine.transport = _Gated(sessions._engine.transport, gate)
        end_parts([pair.prefill, pair.decode], within_s=0.0)
        assert ending._kept == [pair.prefill, pair.decode]
        assert not pair.prefill.close(PASSED)
        assert not pair.decode.close(PASSED)
        gate.set()
        assert pair.prefill.close(time.monotonic() + EDGE_S)
        assert pair.decode.close(time.monotonic() + EDGE_S)
        ending._kept.clear()
