"""How many connections to the internal port there are."""

from __future__ import annotations

import pytest

from pdcluster_router.core.clients.room import Room, RoomLimit
from pdcluster_router.front.callers import Callers, places_for


class Connection:
    def __init__(self, callers: Callers, address: str = "10.0.0.9", *, is_in_use: bool = False) -> None:
        self.callers, self.is_in_use, self.is_open = callers, is_in_use, True
        assert callers.opened(self, address)

    def abort(self) -> None:
        self.is_open = False
        self.callers.closed(self)


def test_ten_thousand_idle_connections_close_no_engines_connection() -> None:
    told: list[str] = []
    callers = Callers(100, Room(1 << 20), 1024, told.append)
    waiting = [Connection(callers, "10.0.0.1", is_in_use=True) for _ in range(70)]
    idle = [Connection(callers, "10.0.0.1") for _ in range(4)]
    crowd = [Connection(callers, f"10.0.0.{2 + number % 4}") for number in range(10_000)]
    assert all(connection.is_open for connection in (*waiting, *idle, crowd[-1]))
    assert 90 < callers.num_open <= 100
    assert told[0] == "more than 100 connections: 4 were closed"


def test_calls_that_wait_are_never_closed_and_no_new_connection_is_turned_away() -> None:
    callers = Callers(2, Room(1 << 20), 1024, lambda _: None)
    waiting = [Connection(callers, is_in_use=True) for _ in range(5)]
    new = Connection(callers, "10.0.0.1")
    assert all(connection.is_open for connection in (*waiting, new))
    assert callers.num_open == 6


def test_a_connection_that_was_closed_leaves_nothing() -> None:
    callers = Callers(2, Room(1 << 20), 1024, lambda _: None)
    for connection in [Connection(callers) for _ in range(2)]:
        callers.closed(connection)
        callers.closed(connection)
    assert callers.num_open == 0


@pytest.mark.parametrize(("room_bytes", "most"), [(64 << 20, 16 << 20), (20 << 20, 8 << 20), (4 << 20, 2 << 20)])
def test_calls_have_a_quarter_of_the_room_and_in_a_small_one_up_to_half_for_the_largest(
    room_bytes: int, most: int
) -> None:
    callers = Callers(2, Room(room_bytes), 8 << 20, lambda _: None)
    room = callers.room_of(Connection(callers))
    assert not room.take(most + 1, RoomLimit.ENGINES)
    assert room.take(most, RoomLimit.ENGINES)


def test_each_client_has_a_place_for_its_call_and_some_are_spare() -> None:
    assert [places_for(num) for num in (1, 64, 1000, 16_384)] == [17, 80, 1250, 20_480]
