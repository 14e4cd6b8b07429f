"""Attempts, leases and cuts between ranks: real side channels and Mooncake, real processes that stop and die.

Each of these is a row of the failure table at the level where its bytes travel; ``test_failures.py`` has the same
with engines around it.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import threading
import time
from contextlib import AbstractContextManager

import msgspec
import numpy as np
import pytest
import zmq

from integration.far_ranks import FarPrefill, far_prefill
from integration.processes import is_stopped
from integration.ranks import Pair, Shape, another_prefill, make_pair
from patience import PATIENCE_S
from pdcluster_connector.core.writers import SessionId
from pdcluster_connector.settings import SessionUse, Settings
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.worker.inbound import InboundSessions
from pdcluster_connector.worker.resharding import Resharding
from pdcluster_protocol.ids import EngineId, RequestId
from pdcluster_protocol.secret import make_secret

QUICK = Settings(quarantine_s=0.5, hold_s=0.5, lease_s=1.0, handshake_timeout_s=20.0)
PATIENT = msgspec.structs.replace(QUICK, lease_s=30.0)
"""Of a decode rank that must not lose a prefill engine that is only slow."""
SESSIONS = {"own": QUICK, "shared": msgspec.structs.replace(QUICK, sessions=SessionUse.SHARED)}
BIG = Shape(num_layers=8, num_blocks=2048, kv_heads=32)
"""64 KiB a block, 1 GiB in all: a push of it can be caught in the middle."""
FAR, NEAR = 200, 77


@pytest.fixture(params=list(SESSIONS.values()), ids=list(SESSIONS))
def quick(request: pytest.FixtureRequest) -> Settings:
    """With a session for each peer, and with one for all."""
    assert isinstance(request.param, Settings)
    return request.param


@pytest.fixture
def patient(quick: Settings) -> Settings:
    """``quick`` for what does not end by a lost lease: on a busy machine a prefill engine is silent for seconds."""
    return msgspec.structs.replace(quick, lease_s=30.0)


def with_another_prefill(pair: Pair, settings: Settings = PATIENT) -> AbstractContextManager[Pair]:
    """The same decode rank, pushed to by a second prefill engine."""
    return another_prefill(pair, settings, engine_id=EngineId("another"))


def push_forever(far: FarPrefill, pair: Pair, name: str) -> None:
    """A push from ``far`` of which some bytes, but not all, have landed when this returns."""
    blocks = list(range(1, BIG.num_blocks))
    pair.expect(name, len(blocks))
    far.stop_in_next_push()
    far.forward(pair.slice_of(name, blocks, blocks))
    assert pair.step_until(lambda: is_stopped(far.pid))
    assert (pair.target.layers[0, ::64, 0] == FAR).any()
    time.sleep(0.2)  # What the kernel holds lands now.
    assert not (pair.target.layers[-1, 1:] == FAR).all(), "the push was over before it could be stopped"
    assert name not in pair.ended


def test_the_next_attempt_fills_the_same_blocks_after_a_lost_one(patient: Settings) -> None:
    with make_pair(settings=patient) as pair, with_another_prefill(pair, patient) as other:
        pair.retries = other.retries = True
        pair.expect("a", 2)
        pair.forward(pair.slice_of("a", [1], [5], is_last=False))
        pair.step(finished=["a"])  # vLLM ends it before the prompt is whole
        assert pair.step_until(lambda: [lost.attempt for lost in pair.losses] == [1])
        assert pair.ended == {}
        other.forward(other.slice_of("a", [8, 9], [5, 6], attempt=2))
        assert other.step_until(lambda: other.ended == {"a": True})
        assert np.array_equal(other.source.layers[:, [8, 9]], other.target.layers[:, [5, 6]])


def test_a_higher_attempt_stops_the_running_one_before_it_writes(patient: Settings) -> None:
    with make_pair(settings=patient) as pair, with_another_prefill(pair, patient) as other:
        pair.expect("a", 2)
        pair.forward(pair.slice_of("a", [1], [5], is_last=False))
        assert pair.step_until(lambda: bool(pair.target.layers[:, 5].any()))
        other.forward(other.slice_of("a", [8, 9], [5, 6], attempt=2))
        assert pair.step_until(lambda: pair.ended == {"a": True})
        pair.forward(pair.slice_of("a", [2], [6]))  # the old one goes on computing
        assert not pair.step_until(lambda: False, timeout_s=0.3)
        assert np.array_equal(other.source.layers[:, [8, 9]], other.target.layers[:, [5, 6]])
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"})


def test_an_attempt_that_comes_after_the_kv_is_here_writes_nothing_and_has_not_failed() -> None:
    with make_pair(settings=PATIENT) as pair, with_another_prefill(pair) as other:
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: pair.ended == {"a": True})
        before = pair.target.layers.copy()
        other.forward(other.slice_of("a", [9], [5], attempt=2))
        other.step(finished=["a"])
        assert other.step_until(lambda: "a" in other.released)
        assert np.array_equal(before, other.target.layers)
        assert other.losses == []


@pytest.mark.parametrize(("sessions", "most"), [("own", 1), ("shared", 2)])
def test_a_prefill_that_goes_silent_loses_its_lease_and_another_one_takes_over(sessions: str, most: int) -> None:
    """Where they share a session, an attempt that waits for the silent one to be cut off is cut off with it. ``most``:
    attempts that may be lost."""
    quick = msgspec.structs.replace(SESSIONS[sessions], lease_s=15.0)  # The other one must not seem silent.
    with make_pair(BIG, quick) as pair, far_prefill(BIG, quick, fill=FAR) as far:
        pair.retries = True
        pair.source.layers[:] = NEAR
        push_forever(far, pair, "a")
        assert pair.step_until(lambda: bool(pair.losses))
        assert "said nothing for 15 s" in pair.losses[0].reason
        blocks = list(range(1, BIG.num_blocks))
        while len(pair.losses) <= most and not pair.ended:
            lost = len(pair.losses)
            pair.forward(pair.slice_of("a", blocks, blocks, attempt=lost + 1))
            assert pair.step_until(lambda: bool(pair.ended) or len(pair.losses) > lost)  # noqa: B023  # called now
            pair.step(finished=["a"])
            assert pair.step_until(lambda: "a" in pair.released)
            pair.released.clear()
        assert pair.ended == {"a": True}
        assert len(pair.losses) <= most
        far.signal(signal.SIGCONT)
        assert not pair.step_until(lambda: False, timeout_s=1.0)
        assert (pair.target.layers[:, 1:] == NEAR).all()


def test_a_killed_prefill_costs_the_lease_and_no_block(quick: Settings) -> None:
    quick = msgspec.structs.replace(quick, lease_s=15.0)  # It must not be lost before it is killed.
    with make_pair(BIG, quick) as pair, far_prefill(BIG, quick, fill=FAR) as far:
        push_forever(far, pair, "a")
        far.signal(signal.SIGKILL)
        assert pair.step_until(lambda: pair.ended == {"a": False})


def test_late_bytes_of_a_stopped_prefill_do_not_touch_the_next_request(patient: Settings) -> None:
    with make_pair(BIG, patient) as pair, far_prefill(BIG, patient, fill=FAR) as far:
        push_forever(far, pair, "a")
        pair.cancel("a")
        assert pair.step_until(lambda: pair.ended == {"a": False})
        pair.target.layers[:] = NEAR  # The pool belongs to somebody else now.
        far.signal(signal.SIGCONT)
        assert not pair.step_until(lambda: False, timeout_s=2.0)
        assert (pair.target.layers == NEAR).all()


class _ForgetsToCut(InboundSessions):
    """Says that a session is closed, and leaves it open."""

    def _start_closing(self, session: SessionId, transport: Transport, close_by: float) -> None:
        self._left_open = transport
        self._closed.append(session)
        self._on_news()


@pytest.mark.slow
def test_without_the_cut_those_bytes_do_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above guards against is real: it must not pass for want of late bytes."""
    monkeypatch.setattr(InboundSessions, "_start_closing", _ForgetsToCut._start_closing)
    with make_pair(BIG, PATIENT) as pair, far_prefill(BIG, QUICK, fill=FAR) as far:
        push_forever(far, pair, "a")
        pair.cancel("a")
        assert pair.step_until(lambda: pair.ended == {"a": False})
        pair.target.layers[:] = NEAR
        far.signal(signal.SIGCONT)
        assert pair.step_until(lambda: bool((pair.target.layers == FAR).any()))


def test_a_cut_stops_one_prefill_engine_and_no_other() -> None:
    with make_pair(BIG, PATIENT) as pair, far_prefill(BIG, QUICK, fill=FAR) as far:
        push_forever(far, pair, "a")
        pair.expect("b", 2)
        pair.forward(pair.slice_of("b", [1], [5], is_last=False))
        pair.cancel("a")
        assert pair.step_until(lambda: pair.ended == {"a": False})
        pair.forward(pair.slice_of("b", [2], [6]))
        assert pair.step_until(lambda: pair.ended.get("b", False))
        assert np.array_equal(pair.source.layers[:, [1, 2]], pair.target.layers[:, [5, 6]])


def test_a_cut_of_a_shared_session_ends_the_pushes_of_others_which_go_on_by_the_next_session() -> None:
    shared = msgspec.structs.replace(PATIENT, sessions=SessionUse.SHARED)  # A lost lease would cut before b is here.
    with make_pair(BIG, shared) as pair, far_prefill(BIG, shared, fill=FAR) as far:
        push_forever(far, pair, "a")
        pair.retries = True
        pair.expect("b", 2)
        pair.forward(pair.slice_of("b", [1], [5], is_last=False))
        assert pair.step_until(lambda: bool((pair.target.layers[:, 5] == pair.source.layers[:, 1]).all()))
        pair.cancel("a")
        assert pair.step_until(lambda: "b" in [lost.request_id for lost in pair.losses])
        assert pair.step_until(lambda: pair.ended == {"a": False})
        pair.target.layers[:] = NEAR
        pair.step(finished=["b"])
        assert pair.step_until(lambda: "b" in pair.released)
        far.signal(signal.SIGCONT)
        pair.forward(pair.slice_of("b", [1, 2], [5, 6], attempt=2))
        assert pair.step_until(lambda: pair.ended.get("b", False))
        assert np.array_equal(pair.source.layers[:, [1, 2]], pair.target.layers[:, [5, 6]])
        others = np.delete(pair.target.layers, [5, 6], axis=1)
        assert (others == NEAR).all(), "late bytes of a"


def test_a_prefill_that_was_cut_off_comes_back_on_a_new_session(patient: Settings) -> None:
    with make_pair(BIG, patient) as pair, far_prefill(BIG, patient, fill=FAR) as far:
        push_forever(far, pair, "a")
        pair.cancel("a")
        assert pair.step_until(lambda: pair.ended == {"a": False})
        far.signal(signal.SIGCONT)
        free = far.finished(["a"])
        while "a" not in free:  # Its lane has heard of the cut by then, and closed its own session.
            time.sleep(0.1)
            free |= far.finished([])
        pair.expect("b", 1)
        far.forward(pair.slice_of("b", [3], [7]))
        assert pair.step_until(lambda: pair.ended.get("b", False))
        assert (pair.target.layers[:, 7] == FAR).all()


def test_ranks_with_different_secrets_never_write_and_both_say_why() -> None:
    secret = make_secret("another cluster!")
    with make_pair(settings=PATIENT) as pair, another_prefill(pair, PATIENT, secret=secret) as other:
        pair.expect("a", 1)
        other.forward(pair.slice_of("a", [1], [5]))
        other.step(finished=["a"])
        assert other.step_until(lambda: "a" in other.released)
        assert not pair.target.layers.any()
        assert pair.ended == {}


def test_an_open_without_the_routers_token_is_denied() -> None:
    with make_pair(settings=PATIENT) as pair:
        pair.expect("a", 1)
        part = pair.slice_of("a", [1], [5])
        pair.forward(msgspec.structs.replace(part, attempt_token="1.00"))
        assert pair.step_until(lambda: bool(pair.losses))
        assert "not valid here" in pair.losses[0].reason
        assert not pair.target.layers.any()


def test_where_no_thread_can_open_a_session_the_nodes_limit_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse_sessions(thread: threading.Thread) -> None:
        if thread.name == "pdcluster-session":
            raise RuntimeError("can't start new thread")
        start(thread)

    with make_pair(settings=PATIENT) as pair:
        pair.expect("a", 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_sessions)
            pair.forward(pair.slice_of("a", [1], [5]))
            assert pair.step_until(lambda: bool(pair.losses))
        assert "can't start new thread): raise the node's limit of processes" in pair.losses[0].reason
        pair.step(finished=["a"])
        assert pair.step_until(lambda: "a" in pair.released)
        pair.expect("b", 1)
        pair.forward(pair.slice_of("b", [2], [6]))
        assert pair.step_until(lambda: pair.ended.get("b", False))


def _no_descriptors(*_: int) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("lacks", ["threads", "descriptors"])
def test_a_prefill_engine_without_room_for_a_lane_computes_on_and_the_next_request_has_one(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse_lanes(thread: threading.Thread) -> None:
        if thread.name.startswith("pdcluster-lane"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with make_pair(settings=PATIENT) as pair:
        pair.expect("a", 1)
        with monkeypatch.context() as patch:
            if lacks == "threads":
                patch.setattr(threading.Thread, "start", refuse_lanes)
            else:
                patch.setattr(os, "eventfd", _no_descriptors)
            pair.forward(pair.slice_of("a", [1], [5]))
        pair.prefill.worker.protect_preempted([RequestId("a")])
        pair.step(finished=["a"])
        assert "a" in pair.released
        pair.expect("b", 1)
        pair.forward(pair.slice_of("b", [2], [6]))
        assert pair.step_until(lambda: pair.ended.get("b", False))
        assert not pair.target.layers[:, 5].any()


class _StillReads(Resharding):
    """A resharder that reads the step's blocks until it is asked for its fence."""

    read_step = 0

    def __init__(self) -> None:
        self.num_asked = 0

    def fence(self) -> threading.Event:
        self.num_asked, self.read_step = self.num_asked + 1, 1
        return super().fence()


def test_blocks_that_only_the_resharder_reads_are_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks push what it reads. The lanes of this rank have ended, or were never made."""
    reads = _StillReads()
    with make_pair(settings=PATIENT) as pair, monkeypatch.context() as patch:
        patch.setattr(pair.prefill.worker, "_resharding", reads)
        patch.setattr(os, "eventfd", _no_descriptors)
        pair.forward(pair.slice_of("a", [1], [5]))
        pair.prefill.worker.protect_preempted([RequestId("a")])
        pair.prefill.worker.protect_preempted([RequestId("a")])
    assert reads.num_asked == 1


def test_a_cut_does_not_stop_the_other_threads_of_the_engine() -> None:
    """Mooncake's own destructor would hold the interpreter for a second: the forward pass would feel it. Each time, and
    not only when the machine itself stands still."""
    assert any(longest_pause_in_a_cut() < 0.5 for _ in range(3))


def longest_pause_in_a_cut() -> float:
    """Of a thread that asks for nothing but the interpreter."""
    with make_pair(BIG, PATIENT) as pair, far_prefill(BIG, QUICK, fill=FAR) as far:
        push_forever(far, pair, "a")
        pauses: list[float] = []
        is_over = threading.Event()

        def tick() -> None:
            last = time.monotonic()
            while not is_over.is_set():
                time.sleep(0.001)
                last, pause = time.monotonic(), time.monotonic() - last
                pauses.append(pause)

        ticker = threading.Thread(target=tick)
        ticker.start()
        pair.cancel("a")
        assert pair.step_until(lambda: pair.ended == {"a": False})
        is_over.set()
        ticker.join()
        return max(pauses)


def test_noise_and_floods_on_the_side_channel_leave_the_pushes_of_members_alone() -> None:
    with make_pair(settings=PATIENT) as pair:
        port, rng = pair.decode.address.port, random.Random(3)
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as raw:
                raw.sendall(rng.randbytes(rng.randrange(1, 4000)))
        context = zmq.Context()
        strangers = [context.socket(zmq.DEALER) for _ in range(5)]
        for stranger in strangers:
            stranger.setsockopt(zmq.SNDTIMEO, 20_000)
            stranger.connect(f"tcp://127.0.0.1:{port}")
            for _ in range(2000):
                stranger.send(rng.randbytes(60))
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: pair.ended == {"a": True})
        context.destroy(linger=0)
