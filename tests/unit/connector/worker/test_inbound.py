"""Inbound sessions: one for each life of a prefill engine; a cut one is another the next time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from math import inf

import pytest

from fakes.network import FakeNetwork
from patience import EDGE_S, PATIENCE_S, until
from pdcluster_connector.core.writers import PeerId, SessionId
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_connector.transport.shared import SharedSessions, Use
from pdcluster_connector.worker.inbound import MAX_GUESTS, MAX_OPENINGS, OPEN_S, InboundSessions, Opened
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import BootId

P, Q = BootId("p"), BootId("q")
A, B = PeerId(b"a"), PeerId(b"b")
PASSED = 0.0
"""A deadline that has passed."""


def soon() -> float:
    """A deadline that does not pass in a test."""
    return time.monotonic() + PATIENCE_S


class Bench:
    def __init__(self, make: Callable[[], Transport] | None = None, *, is_shared: bool = False) -> None:
        self.network = FakeNetwork()
        self.news = threading.Event()
        made = make or self.network.join
        sessions = SharedSessions(made, Use.LETS_IN) if is_shared else Sessions(made)
        self.inbound = InboundSessions(sessions, self.news.set)

    def open(self, boot_id: BootId) -> SessionId:
        """Once it is open."""
        if session := self.inbound.open(boot_id, A, now=0.0):
            return session
        (opened,) = self.wait_for_opened()
        assert opened.session is not None
        return opened.session

    def cut(self, session: SessionId) -> None:
        """It is closed when this returns, and was named."""
        self.news.clear()
        self.inbound.cut(session, close_by=inf)
        assert self.news.wait(PATIENCE_S)
        assert self.inbound.take_closed(now=0.0) == [session]

    def wait_for_opened(self) -> list[Opened]:
        until = time.monotonic() + 30
        while not (opened := self.inbound.take_opened(now=0.0)) and time.monotonic() < until:
            self.news.wait(0.1)
        self.news.clear()
        return opened


class Held:
    """Makes the first session at once, and holds all others back until ``may_open``; ``failure``: instead of them."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.network = FakeNetwork()
        self.is_asked, self.may_open = threading.Event(), threading.Event()
        self.made: list[Transport] = []
        self._failure = failure
        self._has_begun = False

    def __call__(self) -> Transport:
        if self._has_begun:
            self.is_asked.set()
            self.may_open.wait(PATIENCE_S)
            if self._failure is not None:
                raise self._failure
        self._has_begun = True
        self.made.append(self.network.join())
        return self.made[-1]


def held_bench(failure: Exception | None = None) -> tuple[Held, Bench]:
    """The session of ``P`` is open, and no other one opens yet."""
    held = Held(failure)
    bench = Bench(held)
    bench.open(P)
    return held, bench


def test_all_ranks_of_one_engine_life_share_a_session_and_engines_do_not() -> None:
    bench = Bench()
    assert bench.open(P) == bench.open(P) != bench.open(Q)


def test_a_session_that_opens_slowly_keeps_nobody_else_from_theirs() -> None:
    held, bench = held_bench()
    first = bench.open(P)
    assert bench.inbound.open(Q, A, now=0.0) is None
    assert bench.inbound.open(Q, B, now=0.0) is None
    assert bench.inbound.take_opened(now=1.0) == []
    assert bench.inbound.open(P, B, now=1.0) == first
    held.may_open.set()
    (opened,) = bench.wait_for_opened()
    assert opened.peers == (A, B)
    assert opened.session == bench.inbound.open(Q, A, now=2.0) != first
    assert bench.inbound.take_opened(now=2.0) == []


@pytest.mark.parametrize("failure", [ConfigError("no descriptor is left"), RuntimeError("no descriptor is left")])
def test_a_session_that_cannot_be_opened_is_told_to_all_that_asked_and_tried_again_later(failure: Exception) -> None:
    held, bench = held_bench(failure)
    held.may_open.set()
    for peer in (A, B):
        bench.inbound.open(Q, peer, now=0.0)
    (opened,) = bench.wait_for_opened()
    assert (opened.peers[0], opened.session) == (A, None)
    assert "no descriptor is left" in opened.reason
    assert bench.inbound.open(Q, A, now=1.0) is None
    assert bench.inbound.close(soon())


def test_who_waits_too_long_is_told_and_the_session_serves_the_next() -> None:
    held, bench = held_bench()
    bench.inbound.open(Q, A, now=0.0)
    bench.inbound.open(Q, B, now=OPEN_S / 2)
    assert bench.inbound.take_opened(now=OPEN_S - 1) == []
    (late,) = bench.inbound.take_opened(now=OPEN_S)
    assert (late.peers, late.session) == ((A,), None)
    assert "within 60 s" in late.reason
    held.may_open.set()
    (opened,) = bench.wait_for_opened()
    assert opened.peers == (B,)


def test_a_session_that_opens_when_nobody_waits_any_more_is_told_all_the_same() -> None:
    """Who closes idle sessions has to know of it."""
    held, bench = held_bench()
    bench.inbound.open(Q, A, now=0.0)
    (late,) = bench.inbound.take_opened(now=OPEN_S)
    assert late.peers == (A,)
    held.may_open.set()
    (opened,) = bench.wait_for_opened()
    assert opened == Opened((), bench.inbound.open(Q, B, now=OPEN_S))
    assert opened.session is not None


def test_openings_and_those_who_wait_for_one_are_bounded() -> None:
    held, bench = held_bench()
    for number in range(MAX_OPENINGS):
        bench.inbound.open(BootId(f"engine {number}"), A, now=0.0)
    with pytest.raises(ConfigError, match=f"for {MAX_OPENINGS} other prefill engines"):
        bench.inbound.open(Q, A, now=0.0)
    for number in range(1, MAX_GUESTS):
        bench.inbound.open(BootId("engine 0"), PeerId(b"%d" % number), now=0.0)
    with pytest.raises(ConfigError, match=f"{MAX_GUESTS} connections"):
        bench.inbound.open(BootId("engine 0"), B, now=0.0)
    held.may_open.set()
    assert bench.inbound.close(soon())


def test_a_session_that_opens_after_the_end_is_closed_by_who_opened_it() -> None:
    held, bench = held_bench()
    bench.inbound.open(Q, A, now=0.0)
    assert not bench.inbound.close(PASSED)
    held.may_open.set()
    until = time.monotonic() + 30
    while (len(held.made) < 2 or held.network._memories) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(held.made) == 2
    assert not held.network._memories


def test_a_cut_session_is_named_once_when_nothing_can_land_by_it_and_never_opened_again() -> None:
    bench = Bench()
    cut, kept = bench.open(P), bench.open(Q)
    bench.cut(cut)
    assert bench.inbound.take_closed(now=0.0) == []
    assert cut not in bench.network._memories
    assert bench.open(P) != cut
    assert bench.open(Q) == kept
    assert bench.inbound.close(soon())


def test_every_session_is_closed_at_the_end() -> None:
    bench = Bench()
    sessions = [bench.open(P), bench.open(Q)]
    assert bench.inbound.close(soon())
    assert not any(session in bench.network._memories for session in sessions)


def test_sessions_close_side_by_side() -> None:
    """An engine ends within seconds, with however many peers: one after the other none of these would close."""
    bench, meeting = Bench(), threading.Barrier(8)
    for number in range(8):
        bench.open(BootId(f"p{number}"))
    for transport in bench.inbound._open.values():
        meet_before_close(transport, meeting)
    assert bench.inbound.close(soon())
    assert not meeting.broken


def test_sessions_that_are_open_and_not_taken_close_side_by_side_too() -> None:
    network, meeting = FakeNetwork(), threading.Barrier(16)
    made: list[Transport] = []

    def make() -> Transport:
        made.append(network.join())
        meet_before_close(made[-1], meeting)
        return made[-1]

    bench = Bench(make)
    for number in range(16):
        bench.inbound.open(BootId(f"p{number}"), A, now=0.0)
    assert until(lambda: all(it.opening._transport for it in bench.inbound._arrivals.values()))
    assert bench.inbound.close(soon())
    assert len(made) == 16
    assert not network._memories


def meet_before_close(transport: Transport, meeting: threading.Barrier) -> None:
    close = transport.close

    def meet() -> None:
        meeting.wait(PATIENCE_S)
        close()

    transport.close = meet  # type: ignore[method-assign]  # closes only with the others


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_session_whose_close_blocks_is_left_at_the_deadline_and_not_called_closed(*, is_shared: bool) -> None:
    may_close, network = threading.Event(), FakeNetwork()

    def make() -> Transport:
        transport = network.join()
        close = transport.close

        def close_late() -> None:
            assert may_close.wait(EDGE_S)
            close()

        transport.close = close_late  # type: ignore[method-assign]  # the library blocks
        return transport

    bench = Bench(make, is_shared=is_shared)
    session = bench.open(P)
    assert not bench.inbound.close(PASSED)
    assert bench.inbound.take_closed(now=0.0) == []
    assert session in network._memories
    may_close.set()
    assert bench.inbound.close(soon())
    assert bench.inbound.take_closed(now=0.0) == [session]
    assert not network._memories


def test_a_session_that_could_not_be_closed_long_before_the_end_is_not_called_closed_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its failure is why the engine ends. Bytes may still land by it."""
    bench, signals = Bench(), list[int]()
    monkeypatch.setattr("os.kill", lambda _, number: signals.append(number))
    session = bench.open(P)

    def fail() -> None:
        raise RuntimeError("the library gave up")

    bench.inbound._open[P].close = fail  # type: ignore[method-assign]  # the library fails
    bench.inbound.cut(session, close_by=60.0)
    assert until(lambda: signals == [signal.SIGTERM] and not closing_threads())
    assert bench.inbound.take_closed(now=90.0) == []
    assert signals == [signal.SIGTERM], "said once"
    assert not bench.inbound.close(soon())


def test_a_session_whose_close_never_comes_back_ends_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the close: their blocks could never be given back."""
    bench, signals, may_close = Bench(), list[int](), threading.Event()
    monkeypatch.setattr("os.kill", lambda _, number: signals.append(number))
    session = bench.open(P)

    def block() -> None:
        may_close.wait()

    bench.inbound._open[P].close = block  # type: ignore[method-assign]  # the library blocks
    bench.inbound.cut(session, close_by=60.0)
    assert bench.inbound.take_closed(now=59.9) == []
    assert signals == []
    assert bench.inbound.take_closed(now=60.0) == []
    assert bench.inbound.take_closed(now=90.0) == []
    assert signals == [signal.SIGTERM]
    assert not bench.inbound.close(PASSED)
    may_close.set()
    assert bench.inbound.close(soon())


def closing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pdcluster-cut"]


def test_a_shared_session_that_is_being_made_is_left_at_the_deadline_and_closed_once_it_is_made() -> None:
    held = Held()
    bench = Bench(held, is_shared=True)
    bench.cut(bench.open(P))
    bench.inbound.open(Q, A, now=0.0)
    assert held.is_asked.wait(PATIENCE_S)
    assert not bench.inbound.close(PASSED)
    assert len(held.made) == 1
    held.may_open.set()
    assert bench.inbound.close(soon())
    assert len(held.made) == 2
    assert not held.network._memories


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_rank_that_closes_opens_no_session(*, is_shared: bool) -> None:
    """A receiver thread that has not ended may still ask."""
    bench = Bench(is_shared=is_shared)
    assert bench.inbound.close(soon())
    bench.inbound.open(P, A, now=0.0)
    (opened,) = bench.wait_for_opened()
    assert opened.session is None
    assert "is closing" in opened.reason
    assert not bench.network._memories


def test_a_session_is_not_called_closed_while_it_closes() -> None:
    """The order is all of the hard fence: blocks are given back at this word."""
    bench = Bench()
    cut = bench.open(P)
    bench.news.clear()
    is_closing, may_close = threading.Event(), threading.Event()
    transport = bench.inbound._open[P]

    def close_slowly() -> None:
        is_closing.set()
        assert may_close.wait(PATIENCE_S)

    transport.close = close_slowly  # type: ignore[method-assign]  # a transport that takes its time
    bench.inbound.cut(cut, close_by=inf)
    assert is_closing.wait(PATIENCE_S)
    assert not bench.news.wait(0.1)
    assert bench.inbound.take_closed(now=0.0) == []
    may_close.set()
    assert bench.news.wait(PATIENCE_S)
    assert bench.inbound.take_closed(now=0.0) == [cut]


def test_where_engines_share_a_session_a_cut_ends_it_for_all_and_each_gets_the_next_one() -> None:
    bench = Bench(is_shared=True)
    cut = bench.open(P)
    assert bench.open(Q) == cut
    bench.cut(cut)
    assert cut not in bench.network._memories
    assert bench.open(Q) == bench.open(P) != cut
    assert bench.inbound.close(soon())
    assert not bench.network._memories


def test_a_shared_session_that_is_cut_while_another_engine_is_about_to_get_it_is_not_given_out() -> None:
    bench = Bench(is_shared=True)
    cut = bench.open(P)
    assert bench.inbound.open(Q, A, now=0.0) is None
    assert bench.news.wait(PATIENCE_S), "it has its session, and nobody has looked"
    bench.inbound.cut(cut, close_by=inf)
    (opened,) = bench.wait_for_opened()
    assert (opened.peers, opened.session) == ((A,), None)
    assert "closed the session" in opened.reason
    assert bench.open(Q) != cut
    assert bench.inbound.close(soon())


def test_a_shared_session_is_given_to_nobody_from_the_moment_of_its_cut_on() -> None:
    """Closing takes its time, in a thread that may not even run yet: who asks meanwhile would be cut off too."""
    bench, may_close = Bench(is_shared=True), threading.Event()
    cut = bench.open(P)
    transport = bench.inbound._open[P]
    close = transport.close

    def close_late() -> None:
        assert may_close.wait(PATIENCE_S)
        close()

    transport.close = close_late  # type: ignore[method-assign]  # the thread that closes it has not begun
    bench.inbound.cut(cut, close_by=inf)
    assert bench.open(Q) != cut
    may_close.set()
    assert bench.inbound.close(soon())
