"""Sessions: one is ready at start, each is used by one peer, and what nobody took is closed."""

from __future__ import annotations

from pdcluster_connector.transport.fake import FakeNetwork, FakeTransport
from pdcluster_connector.transport.sessions import Sessions


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


def test_one_session_is_opened_at_start_and_each_peer_gets_its_own() -> None:
    bench = Bench()
    assert len(bench.made) == 1
    assert [bench.sessions.open(), bench.sessions.open()] == bench.made
    assert len(bench.made) == 2


def test_only_what_nobody_took_is_closed_at_the_end() -> None:
    unused, used = Bench(), Bench()
    used.sessions.open()
    for bench in (unused, used):
        bench.sessions.close()
    assert unused.is_closed(unused.made[0])
    assert not used.is_closed(used.made[0])
