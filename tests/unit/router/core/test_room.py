"""How many bytes of requests are kept, and whose."""

from __future__ import annotations

import pytest

from pdcluster_router.core.room import Room, RoomLimit


@pytest.mark.parametrize(
    ("share", "most"), [(RoomLimit.CLIENTS_LARGE, 600), (RoomLimit.CLIENTS, 700), (RoomLimit.ENGINES, 800)]
)
def test_each_share_ends_where_it_should(share: RoomLimit, most: int) -> None:
    room = Room(800)
    assert room.take(most, share)
    assert not room.take(1, share)
    assert room.used_bytes == most


def test_large_bodies_leave_room_for_small_ones_and_clients_for_engines() -> None:
    room = Room(800)
    for share, num_bytes in ((RoomLimit.CLIENTS_LARGE, 600), (RoomLimit.CLIENTS, 100), (RoomLimit.ENGINES, 100)):
        assert room.take(num_bytes, share)
    assert not room.take(1, RoomLimit.ENGINES)


def test_what_is_given_back_is_there_again() -> None:
    room = Room(800)
    assert room.take(600, RoomLimit.CLIENTS_LARGE)
    room.give_back(600)
    assert (room.used_bytes, room.take(600, RoomLimit.CLIENTS_LARGE)) == (0, True)
