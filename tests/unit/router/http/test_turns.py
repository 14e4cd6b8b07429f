"""Bodies that came whole in one turn of the loop are handed over in several."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdcluster_router.core.clients.room import SMALL_BYTES, Room
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.http.turns import FREE_BYTES, TURN_BYTES, Row, Rows

LARGE = TURN_BYTES + 1


class Loop:
    """What is called in the next turn."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


class Client:
    """The connection of a cycle that is never answered."""

    def write(self, data: bytes) -> None:
        raise AssertionError(data)

    is_full = False

    def answered(self) -> None:
        raise AssertionError

    def close(self, *, with_reset: bool = False) -> None:
        raise AssertionError(with_reset)


class Scene:
    """Rows, their loop, and what they handed over."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.room = Room(64 << 20)
        self.handed: list[HotCycle] = []
        self.rows = Rows(self.handed.append, self.loop.call_soon)

    def enter(self, num_bytes: int, *, is_for_engines: bool = False) -> HotCycle:
        cycle = HotCycle(Client(), b"/", NO_HEAD, self.rows.enter, self.room, is_for_engines=is_for_engines)
        assert cycle.add_body(b" " * num_bytes, num_bytes) is None
        cycle.hand_over()
        return cycle

    def numbers_by_turn(self) -> list[int]:
        """How many had been handed over after each turn, until nothing happens any more."""
        numbers = [len(self.handed)]
        while self.loop.soon:
            self.loop.turn()
            numbers.append(len(self.handed))
        return numbers


def test_large_bodies_of_one_turn_are_handed_over_one_in_each_turn_in_the_order_they_came() -> None:
    scene = Scene()
    entered = [scene.enter(LARGE) for _ in range(4)]
    assert scene.numbers_by_turn() == [1, 2, 3, 4, 4]
    assert scene.handed == entered


@pytest.mark.parametrize("num_bytes", [FREE_BYTES + 1, SMALL_BYTES, SMALL_BYTES + 1, TURN_BYTES // 2])
def test_no_more_than_the_bytes_of_a_turn_are_handed_over_in_it(num_bytes: int) -> None:
    scene = Scene()
    for _ in range(70):
        scene.enter(num_bytes)
    numbers = scene.numbers_by_turn()
    of_each = [after - before for before, after in zip([0, *numbers], numbers, strict=False)]
    assert max(of_each) == TURN_BYTES // num_bytes
    assert numbers[-1] == 70


def test_a_body_alone_waits_for_no_turn_and_the_rows_rest_afterwards() -> None:
    scene = Scene()
    for number in range(1, 4):
        scene.enter(LARGE)
        assert len(scene.handed) == number
        while scene.loop.soon:
            scene.loop.turn()


def test_who_comes_while_others_wait_does_not_pass_them() -> None:
    scene = Scene()
    entered = [scene.enter(LARGE) for _ in range(3)]
    scene.loop.turn()
    entered.append(scene.enter(SMALL_BYTES + 1))
    scene.numbers_by_turn()
    assert scene.handed == entered


def test_neither_a_small_body_nor_an_engines_call_waits_for_large_ones() -> None:
    scene = Scene()
    for _ in range(3):
        scene.enter(LARGE)
    passing = [scene.enter(FREE_BYTES + 1), scene.enter(LARGE, is_for_engines=True)]
    assert scene.handed[1:] == passing


def test_a_client_that_leaves_while_its_body_waits_keeps_nothing_and_takes_no_turn() -> None:
    scene = Scene()
    entered = [scene.enter(LARGE) for _ in range(4)]
    for gone in entered[1:3]:
        gone.gone()
        assert gone.take_body() == b""
    assert scene.room.used_bytes == 2 * LARGE
    assert scene.numbers_by_turn() == [1, 2, 2]
    assert scene.handed == [entered[0], entered[3]]


def test_a_row_of_clients_that_have_all_left_ends() -> None:
    scene = Scene()
    for cycle in [scene.enter(LARGE) for _ in range(3)]:
        cycle.gone()
    assert scene.numbers_by_turn() == [1, 1]
    scene.enter(LARGE)
    assert len(scene.handed) == 2


def test_a_row_in_which_every_second_has_left_still_takes_one_in_each_turn() -> None:
    handed: list[HotCycle] = []
    loop, room = Loop(), Room(64 << 20)
    row = Row(handed.append, loop.call_soon)
    for number in range(7):
        cycle = HotCycle(Client(), b"/", NO_HEAD, row.enter, room)
        cycle.add_body(b" " * LARGE, LARGE)
        cycle.hand_over()
        if number % 2:
            cycle.gone()
    for number in range(1, 5):
        assert len(handed) == number
        loop.turn()
