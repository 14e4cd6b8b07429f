"""Handshakes come a few in each turn of the loop, and each gets its turn; the loop and the connections are fakes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from pdcluster_router.http.handshakes import SLICE_S, HandshakeRow, Handshakes


class Loop:
    """What is to be called in its next turn."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def turn(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


class Slow:
    """A connection whose handshake takes all that one turn may, in so many steps."""

    def __init__(self, handshakes: HandshakeRow, num_steps: int = 1) -> None:
        self._handshakes = handshakes
        self.num_left = num_steps

    def enter(self) -> None:
        self._handshakes.enter(cast("Any", self))

    def shake(self) -> None:
        ends_at = time.monotonic() + SLICE_S
        while time.monotonic() < ends_at:
            pass
        self.num_left -= 1
        if self.num_left:
            self.enter()


class Broken(Slow):
    is_aborted = False

    def shake(self) -> None:
        raise ZeroDivisionError

    def abort(self) -> None:
        self.is_aborted = True


def test_a_turn_of_the_loop_has_no_more_handshakes_than_fit_into_it() -> None:
    loop = Loop()
    handshakes = Handshakes(loop.call_soon).row()
    clients = [Slow(handshakes) for _ in range(5)]
    for client in clients:
        client.enter()
    for num_done in range(1, 6):
        assert len(loop.due) == 1
        loop.turn()
        assert sum(not client.num_left for client in clients) == num_done
    assert loop.due == []


def test_a_handshake_of_many_pieces_waits_behind_the_others() -> None:
    loop = Loop()
    handshakes = Handshakes(loop.call_soon).row()
    long, short = Slow(handshakes, 3), Slow(handshakes)
    long.enter()
    short.enter()
    loop.turn()
    loop.turn()
    assert (long.num_left, short.num_left) == (2, 0)
    while loop.due:
        loop.turn()
    assert long.num_left == 0


def test_a_crowd_of_clients_keeps_no_engine_waiting() -> None:
    loop = Loop()
    handshakes = Handshakes(loop.call_soon)
    clients, engines = handshakes.row(), handshakes.row()
    crowd, pair = [Slow(clients) for _ in range(9)], [Slow(engines, 2), Slow(engines)]
    for one in (*crowd, *pair):
        one.enter()
    for _ in range(6):
        loop.turn()
    assert [one.num_left for one in pair] == [0, 0]
    assert sum(not one.num_left for one in crowd) == 3
    while loop.due:
        loop.turn()
    assert not any(one.num_left for one in crowd)


def test_a_bug_in_one_handshake_ends_that_connection_and_no_other() -> None:
    loop = Loop()
    handshakes = Handshakes(loop.call_soon).row()
    good = Slow(handshakes)
    broken = Broken(handshakes)
    broken.enter()
    good.enter()
    with pytest.raises(ZeroDivisionError):
        loop.turn()
    assert broken.is_aborted  # It is not read, and may have no timer.
    loop.turn()
    assert good.num_left == 0
