"""A transport session that takes its time to open, as with RDMA, keeps waiting only who needs it."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from integration.ranks import Pair, another_prefill, make_pair
from patience import PATIENCE_S
from pdcluster_connector.ending import end_parts
from pdcluster_connector.settings import Settings
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_protocol.errors import ConfigError

PATIENT = Settings(quarantine_s=30, hold_s=30, lease_s=60, handshake_timeout_s=60)


class Held(Sessions):
    """Sessions that open when the test says so, or not at all."""

    def __init__(self, inner: Sessions) -> None:
        self._inner = inner
        self.is_asked, self.may_open = threading.Event(), threading.Event()
        self.failure = ""

    def open(self) -> Transport:
        self.is_asked.set()
        assert self.may_open.wait(2 * PATIENCE_S)
        if self.failure:
            raise ConfigError(self.failure)
        return self._inner.open()

    def close(self, deadline: float) -> bool:
        return self._inner.close(deadline)


def hold_decode(pair: Pair) -> Held:
    """From now on decode's sessions are held."""
    inbound = pair.decode.worker._sessions
    held = inbound._sessions = Held(inbound._sessions)
    return held


def hold_prefill(pair: Pair) -> Held:
    """Likewise those of prefill's lanes."""
    worker = pair.prefill.worker
    held = Held(worker._context.sessions)
    worker._context = replace(worker._context, sessions=held)
    return held


def require_push(pair: Pair, name: str) -> None:
    """A push of ``pair`` begins and ends well."""
    pair.expect(name, 1)
    pair.forward(pair.slice_of(name, [1], [5]))
    assert pair.step_until(lambda: name in pair.ended, timeout_s=PATIENCE_S)
    assert pair.ended[name]


def test_while_decode_opens_a_session_for_one_prefill_engine_the_others_go_on() -> None:
    with make_pair(settings=PATIENT) as pair:
        require_push(pair, "a")
        held = hold_decode(pair)
        with another_prefill(pair, PATIENT) as other:
            other.expect("slow", 1, deadline_ms=120_000)
            other.forward(other.slice_of("slow", [2], [6], deadline_ms=120_000))
            assert held.is_asked.wait(PATIENCE_S)
            require_push(pair, "b")
            assert "slow" not in other.ended
            held.may_open.set()
            assert other.step_until(lambda: other.ended.get("slow", False), timeout_s=PATIENCE_S)
            assert np.array_equal(other.source.layers[:, 2], other.target.layers[:, 6])


def test_decodes_deadlines_hold_while_it_opens_a_session() -> None:
    with make_pair(settings=PATIENT) as pair:
        held = hold_decode(pair)
        pair.expect("a", 1, deadline_ms=1_000)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert held.is_asked.wait(PATIENCE_S)
        assert pair.step_until(lambda: pair.ended == {"a": False}, timeout_s=PATIENCE_S)
        held.may_open.set()


def test_a_session_that_decode_cannot_open_fails_the_push_at_once_and_harms_no_other() -> None:
    with make_pair(settings=PATIENT) as pair:
        require_push(pair, "a")
        held = hold_decode(pair)
        held.failure = "no descriptor is left"
        held.may_open.set()
        with another_prefill(pair, PATIENT) as other:
            other.expect("slow", 1)
            other.forward(other.slice_of("slow", [2], [6]))
            assert other.step_until(lambda: bool(other.losses), timeout_s=PATIENCE_S)
            assert "no descriptor is left" in other.losses[0].reason
            require_push(pair, "b")


def test_prefills_deadlines_hold_while_a_lane_opens_its_session() -> None:
    with make_pair(settings=PATIENT) as pair:
        held = hold_prefill(pair)
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5], deadline_ms=1_000))
        pair.step(finished=["a"])
        assert held.is_asked.wait(PATIENCE_S)
        assert pair.step_until(lambda: pair.released == {"a"}, timeout_s=PATIENCE_S)
        held.may_open.set()
        require_push(pair, "b")


def test_a_rank_that_closes_while_a_session_opens_leaves_no_thread_behind() -> None:
    with make_pair(settings=PATIENT) as pair:
        held = [hold_prefill(pair)]
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert held[0].is_asked.wait(PATIENCE_S)
        end_parts([pair.prefill])
        opening = [thread for thread in threading.enumerate() if thread.name == "pdcluster-session"]
        held[0].may_open.set()
        for thread in opening:
            thread.join(PATIENCE_S)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("pdcluster")] == []
