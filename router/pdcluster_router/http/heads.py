"""What a connection's heads take of the room: half ones, and those of pages. A hot request counts its own."""

from __future__ import annotations

from typing import Final

from pdcluster_router.core.room import Room, RoomLimit

MAX_FREE_BYTES: Final = 16 << 10
"""A page's head up to here takes no room: a probe of our health is served when clients have filled it."""


class Heads:
    """Owned by its connection. ``close`` gives all of it back."""

    __slots__ = ("_num_page_bytes", "_room", "_share", "num_half_bytes")

    def __init__(self, room: Room, share: RoomLimit) -> None:
        """``share``: whose connection it is."""
        self._room = room
        self._share = share
        self.num_half_bytes = 0
        """Of a head that did not come at once."""
        self._num_page_bytes = 0

    def hold_half(self, num_bytes: int) -> bool:
        """Whether there is room for a head that does not come at once, and has ``num_bytes`` by now."""
        more = num_bytes - self.num_half_bytes
        if more > 0 and not self._room.take(more, self._share):
            return False
        self.num_half_bytes = max(self.num_half_bytes, num_bytes)
        return True

    def is_whole(self) -> None:
        """There is no half head any more."""
        self._room.give_back(self.num_half_bytes)
        self.num_half_bytes = 0

    def take_page(self, num_bytes: int) -> bool:
        """Whether there is room for a page's head until ``page_is_over``."""
        if num_bytes > MAX_FREE_BYTES:
            if not self._room.take(num_bytes, self._share):
                return False
            self._num_page_bytes += num_bytes
        return True

    def page_is_over(self, num_bytes: int) -> None:
        """The page whose head took ``num_bytes`` is answered. After ``close`` nothing is left to give back."""
        if num_bytes > MAX_FREE_BYTES and self._num_page_bytes:
            self._num_page_bytes -= num_bytes
            self._room.give_back(num_bytes)

    def close(self) -> None:
        self.is_whole()
        self._room.give_back(self._num_page_bytes)
        self._num_page_bytes = 0
