"""The room as the internal port sees it: who holds its bytes there, by address and by connection.

Anybody who reaches the port may send half a call, and only a whole one shows whether an engine has sealed it. So the
bytes of all calls are bounded: the rest of the room is left to clients. When a call finds no room, the address that
holds the most makes some (``crowd.py`` says which of its connections).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdcluster_router.core.clients.room import Room, RoomLimit

CALLS_PART: Final = 4
"""All calls together hold at most the room's bytes divided by this. A call has a tenth of the bytes of its prompt, or
less."""
SMALL_ROOM_PART: Final = 2
"""The divisor instead of ``CALLS_PART`` in a room so small that the largest call would not fit into that part."""


class CallsRoom:
    """The bytes of all calls on the internal port. Event loop only."""

    __slots__ = ("held_bytes", "make_room", "max_bytes", "room", "used_bytes")

    def __init__(self, room: Room, largest_bytes: int, make_room: Callable[[str, int, int], None]) -> None:
        """``largest_bytes``: those of the largest call. ``make_room``: called with an address, the bytes it asks for,
        and how many of them have no room."""
        self.room = room
        self.make_room = make_room
        self.max_bytes = max(room.max_bytes // CALLS_PART, min(room.max_bytes // SMALL_ROOM_PART, largest_bytes))
        self.used_bytes = 0
        self.held_bytes: dict[str, int] = {}
        """Bytes by address. An address that holds none is not in it."""

    def num_missing(self, num_bytes: int) -> int:
        """How many of ``num_bytes`` have no room; 0 or less: all of them have."""
        return num_bytes - min(self.max_bytes - self.used_bytes, self.room.max_bytes - self.room.used_bytes)


class CallerRoom(Room):
    """The room for one connection to the internal port. ``used_bytes``: its own. Owned by its connection.

    While there is room, its functions call no others, for speed: each call of an engine comes here.
    """

    __slots__ = ("_calls", "address", "is_closed")

    def __init__(self, calls: CallsRoom, address: str) -> None:
        super().__init__(calls.room.max_bytes)
        self._calls = calls
        self.address = address
        self.is_closed = False

    def take(self, num_bytes: int, share: RoomLimit, holder: str = "") -> bool:  # noqa: ARG002  # the address holds it
        """Whether there was room, or other connections made some; if so it is taken until ``give_back`` or
        ``close``."""
        if self.is_closed or not num_bytes:
            return True
        calls, room = self._calls, self._calls.room
        if calls.used_bytes + num_bytes > calls.max_bytes or room.used_bytes + num_bytes > room.max_bytes:
            calls.make_room(self.address, num_bytes, calls.num_missing(num_bytes))
            if calls.num_missing(num_bytes) > 0:
                return False
        held = calls.held_bytes
        held[self.address] = held[self.address] + num_bytes if self.address in held else num_bytes
        calls.used_bytes += num_bytes
        room.used_bytes += num_bytes
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int, holder: str = "") -> None:  # noqa: ARG002  # the address held it
        if self.is_closed or not num_bytes:
            return
        calls = self._calls
        self.used_bytes -= num_bytes
        calls.room.used_bytes -= num_bytes
        calls.used_bytes -= num_bytes
        calls.held_bytes[self.address] -= num_bytes
        if not calls.held_bytes[self.address]:
            del calls.held_bytes[self.address]

    def close(self) -> None:
        """All is given back at once, and nothing counts from now on: the connection is being cut off."""
        self.give_back(self.used_bytes)
        self.is_closed = True
