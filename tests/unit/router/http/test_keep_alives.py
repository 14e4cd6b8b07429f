"""One timer keeps all silent streams of a router alive; time and connections are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from pdcluster_router.core.keep_alive import COMMENT
from pdcluster_router.core.room import Room
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.http.keep_alives import KeepAlives

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

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        assert self.timer is None
        self.timer = (self.time + delay_s, callback)
        return cast("asyncio.TimerHandle", self)

    def cancel(self) -> None:
        self.timer = None

    def advance(self, seconds: float) -> None:
        end = self.time + seconds
        while self.timer is not None and self.timer[0] <= end:
            (self.time, callback), self.timer = self.timer, None
            callback()
        self.time = end


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


def test_0_watches_nothing() -> None:
    clock = Clock()
    KeepAlives(0.0, clock.now, clock.call_later).watch(stream_on(Client()))
    assert clock.timer is None
