"""One timer keeps all silent streams of a router alive; time and connections are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from pdcluster_router.core.clients.room import Room
from pdcluster_router.core.requests.keep_alive import COMMENT
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.http.keep_alives import MIN_TICK_S, MOST_LOOKS, KeepAlives

EVERY_S = 10.0


class Client:
    """A connection whose client reads, or not."""

    def __init__(self) -> None:
        self.is_full = False
        self.said = b""

    def write(self, data: bytes) -> None:
        self.said += data

    def answered(self) -> None: ...

    def close(self, *, with_reset: bool = False) -> None: ...


class Clock:
    """Time that a test moves on, and at most one timer."""

    def __init__(self) -> None:
        self.time = 100.0
        self.timer: tuple[float, Callable[[], None]] | None = None
        self.num_calls = 0
        """So often the timer was set."""

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        assert self.timer is None
        self.num_calls += 1
        self.timer = (self.time + delay_s, callback)
        return cast("asyncio.TimerHandle", self)

    def cancel(self) -> None:
        self.timer = None

    def advance(self, seconds: float) -> None:
        end = self.time + seconds
        while self.is_due(end):
            self.fire()
        self.time = end

    def is_due(self, end: float) -> bool:
        return self.timer is not None and self.timer[0] <= end

    def fire(self) -> None:
        """The timer fires, late where its time has passed."""
        assert self.timer is not None
        (due_at, callback), self.timer = self.timer, None
        self.time = max(self.time, due_at)
        callback()


def stream_on(client: Client) -> HotCycle:
    return HotCycle(client, b"/v1/completions", NO_HEAD, lambda _: None, Room(1 << 20))


def test_each_stream_gets_its_comments_by_its_own_time() -> None:
    clock, first, second = Clock(), Client(), Client()
    alive = KeepAlives(EVERY_S, clock.now, clock.call_later)
    alive.watch(stream_on(first))
    clock.advance(4.0)
    alive.watch(stream_on(second))
    clock.advance(6.5)
    assert (first.said.count(COMMENT), second.said.count(COMMENT)) == (1, 0)
    clock.advance(4.0)
    assert (first.said.count(COMMENT), second.said.count(COMMENT)) == (1, 1)
    assert alive.num_comments == 2


def test_a_client_that_takes_less_than_is_written_gets_none_until_it_reads_again() -> None:
    clock, client = Clock(), Client()
    client.is_full = True
    alive = KeepAlives(EVERY_S, clock.now, clock.call_later)
    alive.watch(stream_on(client))
    clock.advance(10 * EVERY_S)
    assert client.said == b""
    client.is_full = False
    clock.advance(EVERY_S / 2 + 0.1)
    assert client.said.count(COMMENT) == 1


def test_a_stream_that_is_over_gets_none_and_the_timer_rests_without_streams() -> None:
    clock, ended, left = Clock(), Client(), Client()
    alive = KeepAlives(EVERY_S, clock.now, clock.call_later)
    whole, gone = stream_on(ended), stream_on(left)
    alive.watch(whole)
    alive.watch(gone)
    whole.answer(200, b"{}")
    gone.gone()
    clock.advance(2 * EVERY_S)
    assert alive.num_comments == 0
    assert clock.timer is None


def test_nothing_is_written_and_no_timer_is_left_once_it_is_closed() -> None:
    clock, client = Clock(), Client()
    alive = KeepAlives(EVERY_S, clock.now, clock.call_later)
    alive.watch(stream_on(client))
    alive.close()
    assert clock.timer is None
    clock.advance(2 * EVERY_S)
    assert client.said == b""


def test_streams_that_are_due_soon_after_each_other_share_a_round() -> None:
    clock, clients = Clock(), [Client() for _ in range(20)]
    alive = KeepAlives(EVERY_S, clock.now, clock.call_later)
    for client in clients:
        alive.watch(stream_on(client))
        clock.advance(MIN_TICK_S / 40)
    clock.advance(EVERY_S + 2 * MIN_TICK_S)
    assert [client.said.count(COMMENT) for client in clients] == [1] * 20
    assert clock.num_calls <= 7  # The first one, and after each of two rounds of looks three at most.


def test_after_the_router_stood_still_its_streams_are_looked_at_over_several_turns_of_the_loop() -> None:
    clock, clients = Clock(), [Client() for _ in range(3 * MOST_LOOKS)]
    alive = KeepAlives(EVERY_S, clock.now, clock.call_later)
    for client in clients:
        alive.watch(stream_on(client))
    num_at_once = []
    for _ in range(2):
        clock.time += EVERY_S
        while clock.is_due(clock.time):
            num_before = alive.num_comments
            clock.fire()
            num_at_once.append(alive.num_comments - num_before)
    assert [client.said.count(COMMENT) for client in clients] == [1] * len(clients)
    assert max(num_at_once) <= MOST_LOOKS


def test_no_setting_is_so_short_that_looks_never_end() -> None:
    clock, client = Clock(), Client()
    alive = KeepAlives(1e-300, clock.now, clock.call_later)
    alive.watch(stream_on(client))
    clock.advance(20 * MIN_TICK_S)
    assert 0 < alive.num_comments <= 20


def test_0_watches_nothing() -> None:
    clock = Clock()
    KeepAlives(0.0, clock.now, clock.call_later).watch(stream_on(Client()))
    assert clock.timer is None
