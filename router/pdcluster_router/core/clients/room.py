"""The bytes of requests whose answer has not begun: a router bounds them over all connections and its queue.

    0 ............... 3/4 ...... 7/8 ...... max_bytes
    large bodies ------>|          |            |
    small ones, heads ------------>|            |
    what engines bring, a quarter at most ----->|     (up to half where the largest call needs it)

A client that finds no room is told to come back. If clients waited for room, each with half a body here, all of them
could run out of time. Large bodies leave room for small ones, and all clients leave room for what engines bring. Where
there are several keys, the slow uploads or queued prompts of one key leave room for the others. ``caller_room.py``
bounds what comes to the internal port.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

SMALL_BYTES: Final = 256 << 10
"""A body up to here is a small one: some 64,000 tokens of text."""

TIMES_FREE: Final = 2
"""No holder may hold more than this many times the free bytes. With 2, a holder that is alone gets two thirds of its
limit. Two holders that want all of it leave a fifth, so a third one finds room. No part is set aside for each key.
Switches share their buffers so (dynamic thresholds: Choudhury and Hahne, 1998)."""


MAX_FREE_BYTES: Final = 16 << 10
"""A page's head up to here takes no room, so a probe of the router's health is served when clients have filled the
room."""


class RoomLimit(IntEnum):
    """Eighths of the room that may be in use after a ``take``, by who takes. No plain Enum: its ``value`` costs two
    calls."""

    CLIENTS_LARGE = 6
    CLIENTS = 7
    ENGINES = 8


class Room:
    """The bytes in use. Event loop only."""

    __slots__ = ("_held_bytes", "max_bytes", "used_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._held_bytes: dict[str, int] = {}
        """Bytes by holder. A holder without bytes is not in it."""

    def take(self, num_bytes: int, share: RoomLimit, holder: str = "") -> bool:
        """Whether there was room; if so it is taken until ``give_back``. ``holder``: a key's name, or empty: then only
        the room bounds it."""
        free_eighths = self.max_bytes * share - (self.used_bytes + num_bytes) * 8
        if free_eighths < 0:
            return False
        if holder:
            held_bytes = self._held_bytes.get(holder, 0) + num_bytes
            if held_bytes * 8 > free_eighths * TIMES_FREE:
                return False
            self._held_bytes[holder] = held_bytes
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int, holder: str = "") -> None:
        self.used_bytes -= num_bytes
        if holder:
            self._held_bytes[holder] -= num_bytes
            if not self._held_bytes[holder]:
                del self._held_bytes[holder]


class Heads:
    """The room that a connection's heads take: heads that are not whole yet, and heads of pages.

    A request to prefill and decode takes room for its own head. Owned by its connection. ``close`` gives all of it
    back.
    """

    __slots__ = ("_num_page_bytes", "_room", "_share", "num_half_bytes")

    def __init__(self, room: Room, share: RoomLimit) -> None:
        """``share``: the limit for a client's, or an engine's, connection."""
        self._room = room
        self._share = share
        self.num_half_bytes = 0
        """Bytes taken for a head that did not come at once."""
        self._num_page_bytes = 0

    def hold_half(self, num_bytes: int) -> bool:
        """Whether there is room for a head that does not come at once, and has ``num_bytes`` by now."""
        more = num_bytes - self.num_half_bytes
        if more > 0 and not self._room.take(more, self._share):
            return False
        self.num_half_bytes = max(self.num_half_bytes, num_bytes)
        return True

    def is_whole(self) -> None:
        """Gives back the room of the half head: it is whole now, or its connection ends."""
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


def without_used(rest: memoryview) -> memoryview:
    """``rest``, or a copy if it is less than half of its buffer: any view keeps the whole buffer in memory."""
    return memoryview(bytes(rest)) if 2 * rest.nbytes < memoryview(rest.obj).nbytes else rest


class Unread:
    """The room for bytes that have come on a connection and are not looked at yet. Owned by its connection."""

    __slots__ = ("_room", "_share", "num_bytes")

    def __init__(self, room: Room, share: RoomLimit) -> None:
        """``share``: the limit for a client's, or an engine's, connection."""
        self._room = room
        self._share = share
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> bool:
        """Whether there is room for ``num_bytes`` once the bytes held before are given back. If not, none are held."""
        self.release()
        if not self._room.take(num_bytes, self._share):
            return False
        self.num_bytes = num_bytes
        return True

    def looked_at(self, num_bytes: int) -> None:
        """The first ``num_bytes`` have been looked at, and give their room back. Their content may take room of its
        own."""
        num_bytes = min(num_bytes, self.num_bytes)
        self.num_bytes -= num_bytes
        self._room.give_back(num_bytes)

    def release(self) -> None:
        """Gives back all bytes that it holds."""
        self._room.give_back(self.num_bytes)
        self.num_bytes = 0
