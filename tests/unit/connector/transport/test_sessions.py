"""Sessions: one is ready at start, each is used by one peer, and what nobody took is closed, also what opens late."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from fakes.network import FakeNetwork, FakeTransport
from patience import PATIENCE_S, until
from pdcluster_connector.transport.base import RegisteredMemory, Transport
from pdcluster_connector.transport.sessions import Opening, Sessions, close_or_end_engine, close_within
from pdcluster_protocol.errors import ConfigError


class Bench:
    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.made: list[FakeTransport] = []
        self.sessions = Sessions(self.make)

    def make(self) -> FakeTransport:
        self.made.append(self.network.join())
        return self.made[-1]

    def is_closed(self, transport: FakeTransport) -> bool:
        return transport.session not in self.network._memories


def test_where_no_thread_can_be_started_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bench = Bench()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConfigError, match=r"can't start new thread.*: raise the node's limit of processes"):
        Opening(bench.sessions, lambda: None)


def test_one_session_is_opened_at_start_and_each_peer_gets_its_own() -> None:
    bench = Bench()
    assert len(bench.made) == 1
    assert [bench.sessions.open(), bench.sessions.open()] == bench.made
    assert len(bench.made) == 2


def test_only_what_nobody_took_is_closed_at_the_end() -> None:
    unused, used = Bench(), Bench()
    used.sessions.open()
    for bench in (unused, used):
        assert bench.sessions.close(time.monotonic() + PATIENCE_S)
    assert unused.is_closed(unused.made[0])
    assert not used.is_closed(used.made[0])


def test_a_session_that_opens_after_its_lane_has_ended_is_closed() -> None:
    """A peer could write to our memory by it for as long as the engine lives."""
    bench, may_open, has_ended = Bench(), threading.Event(), threading.Event()

    class Slow(Sessions):
        def open(self) -> Transport:
            assert may_open.wait(PATIENCE_S)
            return super().open()

    opening = Opening(Slow(bench.make), has_ended.set)
    opening.close(0.0)
    may_open.set()
    assert has_ended.wait(PATIENCE_S)
    assert opening.take() is None
    assert bench.is_closed(bench.made[-1])


@contextmanager
def shutdown_signals() -> Iterator[list[int]]:
    """Signals to end that this process got meanwhile; they are only noted."""
    heard: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before)


class Stuck(FakeTransport):
    def close(self) -> None:
        raise RuntimeError("the library gave up")


def make_stuck() -> Stuck:
    return Stuck(FakeNetwork(), "stuck", RegisteredMemory())


def test_a_session_that_cannot_be_closed_ends_the_engine_and_is_never_called_closed() -> None:
    with shutdown_signals() as heard:
        assert close_or_end_engine(FakeNetwork().join())
        assert heard == []
        assert not close_or_end_engine(make_stuck())
        assert heard == [signal.SIGTERM]


class Slow(FakeTransport):
    """Its close comes back when it may."""

    may_close: threading.Event

    def close(self) -> None:
        assert self.may_close.wait(PATIENCE_S)
        super().close()


def make_slow(network: FakeNetwork) -> Slow:
    slow = Slow(network, "slow", RegisteredMemory())
    slow.may_close = threading.Event()
    return slow


def test_a_session_that_does_not_close_in_time_ends_the_engine_once_and_counts_as_closed_when_it_is() -> None:
    slow, closed = make_slow(FakeNetwork()), list[bool]()
    with shutdown_signals() as heard:
        closing = threading.Thread(target=lambda: closed.append(close_within(slow, 0.1)))
        closing.start()
        assert until(lambda: heard == [signal.SIGTERM])
        assert not closed
        slow.may_close.set()
        closing.join(PATIENCE_S)
        assert closed == [True]
        assert heard == [signal.SIGTERM]


def test_a_session_that_closes_in_time_leaves_nobody_who_waits_for_it() -> None:
    with shutdown_signals() as heard:
        assert close_within(FakeNetwork().join(), PATIENCE_S)
        assert not close_within(make_stuck(), PATIENCE_S)
        assert until(lambda: "pdcluster-close" not in [thread.name for thread in threading.enumerate()])
        assert heard == [signal.SIGTERM], "of the stuck one"


def test_a_session_that_nothing_waits_for_may_take_for_ever_and_nobody_watches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", None)  # None is started.
    assert close_within(FakeNetwork().join(), math.inf)


def test_a_session_that_was_opened_and_not_taken_is_closed_within_the_limit_too() -> None:
    slow, has_ended = make_slow(FakeNetwork()), threading.Event()
    opening = Opening(Sessions(lambda: slow), has_ended.set)
    assert has_ended.wait(PATIENCE_S)
    with shutdown_signals() as heard:
        closing = threading.Thread(target=lambda: opening.close(0.0, 0.1))
        closing.start()
        assert until(lambda: heard == [signal.SIGTERM])
        slow.may_close.set()
        closing.join(PATIENCE_S)


def test_where_no_thread_can_be_started_a_session_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    network = FakeNetwork()
    assert close_within(network.join(), 0.1)
    assert not network._memories


def test_a_session_that_opens_late_and_cannot_be_closed_is_not_called_closed() -> None:
    may_open, is_over = threading.Event(), threading.Event()

    class Slow(Sessions):
        def open(self) -> Transport:
            assert may_open.wait(PATIENCE_S)
            return make_stuck()

    with shutdown_signals():
        opening = Opening(Slow(FakeNetwork().join), is_over.set)
        assert not opening.close(0.0)
        may_open.set()
        assert is_over.wait(PATIENCE_S)
        assert not opening.close(PATIENCE_S)
