"""Inbound sessions: one for each life of a prefill engine; a cut one is another the next time."""

from __future__ import annotations

import threading

from pdcluster_connector.transport.fake import FakeNetwork
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_connector.worker.inbound import InboundSessions
from pdcluster_protocol.ids import BootId

P, Q = BootId("p"), BootId("q")


class Bench:
    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.closed = threading.Event()
        self.inbound = InboundSessions(Sessions(self.network.join), self.closed.set)


def test_all_ranks_of_one_engine_life_share_a_session_and_engines_do_not() -> None:
    bench = Bench()
    assert bench.inbound.open(P) == bench.inbound.open(P) != bench.inbound.open(Q)


def test_a_cut_session_is_named_once_when_nothing_can_land_by_it_and_never_opened_again() -> None:
    bench = Bench()
    cut, kept = bench.inbound.open(P), bench.inbound.open(Q)
    bench.inbound.cut(cut)
    assert bench.closed.wait(5.0)
    assert bench.inbound.take_closed() == [cut]
    assert bench.inbound.take_closed() == []
    assert cut not in bench.network._memories
    assert bench.inbound.open(P) != cut
    assert bench.inbound.open(Q) == kept
    bench.inbound.close()


def test_every_session_is_closed_at_the_end() -> None:
    bench = Bench()
    sessions = [bench.inbound.open(P), bench.inbound.open(Q)]
    bench.inbound.close()
    assert not any(session in bench.network._memories for session in sessions)


def test_a_session_is_not_called_closed_while_it_closes() -> None:
    """The order is all of the hard fence: blocks are given back at this word."""
    bench = Bench()
    cut = bench.inbound.open(P)
    is_closing, may_close = threading.Event(), threading.Event()
    transport = bench.inbound._open[P]

    def close_slowly() -> None:
        is_closing.set()
        assert may_close.wait(5.0)

    transport.close = close_slowly  # type: ignore[method-assign]  # a transport that takes its time
    bench.inbound.cut(cut)
    assert is_closing.wait(5.0)
    assert not bench.closed.wait(0.1)
    assert bench.inbound.take_closed() == []
    may_close.set()
    assert bench.closed.wait(5.0)
    assert bench.inbound.take_closed() == [cut]
