from __future__ import annotations

from pdcluster_router.core.room import Room, RoomLimit
from pdcluster_router.http.heads import MAX_FREE_BYTES, Heads

NUM_BYTES = MAX_FREE_BYTES + 1


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
