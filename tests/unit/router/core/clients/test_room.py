"""How many bytes of requests are kept, and whose."""

from __future__ import annotations

import pytest

from pdcluster_router.core.clients.room import MAX_FREE_BYTES, Heads, Room, RoomLimit, Unread, without_used

NUM_BYTES = MAX_FREE_BYTES + 1


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


def test_a_page_that_ends_after_its_connection_gives_nothing_back_twice() -> None:
    room = Room(1 << 20)
    heads = Heads(room, RoomLimit.CLIENTS)
    assert heads.take_page(NUM_BYTES)
    assert heads.take_page(NUM_BYTES)
    heads.page_is_over(NUM_BYTES)
    assert room.used_bytes == NUM_BYTES
    heads.close()
    heads.page_is_over(NUM_BYTES)
    assert room.used_bytes == 0


def test_half_a_head_of_an_engine_has_room_when_clients_have_filled_theirs() -> None:
    room = Room(1 << 20)
    while room.take(4096, RoomLimit.CLIENTS):
        pass
    assert not Heads(room, RoomLimit.CLIENTS).hold_half(4096)
    assert Heads(room, RoomLimit.ENGINES).hold_half(4096)


def test_unread_bytes_take_the_room_of_those_before_them_and_none_if_there_is_no_more() -> None:
    room = Room(800)
    unread = Unread(room, RoomLimit.CLIENTS)
    assert [unread.hold(600), unread.hold(700), unread.hold(200)] == [True] * 3
    assert (room.used_bytes, unread.num_bytes) == (200, 200)
    assert not unread.hold(701)
    assert (room.used_bytes, unread.num_bytes) == (0, 0)
    unread.release()
    assert room.used_bytes == 0


def test_unread_bytes_that_are_looked_at_give_their_room_back_at_once() -> None:
    room = Room(800)
    unread = Unread(room, RoomLimit.CLIENTS)
    assert unread.hold(600)
    unread.looked_at(250)
    assert (room.used_bytes, unread.num_bytes) == (350, 350)
    unread.looked_at(700)
    assert (room.used_bytes, unread.num_bytes) == (0, 0)


def test_a_small_rest_of_a_large_read_does_not_keep_the_read() -> None:
    read = bytes(1000)
    assert without_used(memoryview(read)[500:]).obj is read
    rest = without_used(memoryview(read)[501:])
    assert (rest.obj is read, rest.nbytes) == (False, 499)
