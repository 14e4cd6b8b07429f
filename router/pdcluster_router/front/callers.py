"""Bounds the connections to the internal port, and the bytes that they hold. The callers are engines, probes,
monitoring and the operator.

    within max_internal_connections    served
    above                              unused connections are closed to make room, and a few more: core/clients/crowd.py
    no room for the bytes of a call    connections of addresses that hold much more are closed, else the call is refused

A new connection is never refused, for it may be an engine's. Each request of a client may hold one call from decode.
All other callers share the spare places. So some connections are unused even when each client waits for prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from pdcluster_router.core.clients.caller_room import CallerRoom, CallsRoom
from pdcluster_router.core.clients.crowd import CallerPlace, may_ask, places_to_clear, places_to_empty
from pdcluster_router.core.clients.room import Room, RoomLimit, Unread
from pdcluster_router.http.handshakes import Abortable

CLIENTS_PER_SPARE: Final = 4
"""Clients for each spare place."""
MIN_SPARE: Final = 16
"""A kubelet, a Prometheus or two, the operator and a person with a terminal, each with several connections."""
EXTRA_SHARE: Final = 32
"""One in so many is closed in advance. Else each connection of a crowd would cost a look at all others, 1 us each."""


class Caller(Abortable, Protocol):
    """A connection to the internal port, as ``Callers`` needs it."""

    @property
    def is_in_use(self) -> bool:
        """Whether an accepted call, or a whole request for a page, waits here for its answer."""
        ...


class Callers:
    """The open connections of one router's internal port. Event loop only."""

    def __init__(
        self, max_connections: int, room: Room, largest_call_bytes: int, on_closed: Callable[[str], None]
    ) -> None:
        """``room``: where the bytes of calls count. ``on_closed``: called with the reason when some are closed."""
        self._max_connections = max_connections
        self._on_closed = on_closed
        self._calls = CallsRoom(room, largest_call_bytes, self._make_room)
        self._open: dict[Caller, CallerRoom] = {}
        """The oldest connection first."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def opened(self, caller: Caller, address: str) -> bool:
        """Counts ``caller``. Returns True: each is served. Call ``closed`` at its end; a second call does nothing."""
        if len(self._open) >= self._max_connections:
            self._make_places(len(self._open) - self._max_connections + 1)
        self._open[caller] = CallerRoom(self._calls, address)
        return True

    def room_of(self, caller: Caller) -> Room:
        """The room that counts the bytes of ``caller``, which must be open. It stays valid after ``closed``."""
        return self._open[caller]

    def unread_of(self, caller: Caller) -> Unread:
        """The room for bytes of ``caller`` that are not decrypted yet. ``caller`` must be open."""
        return Unread(self._open[caller], RoomLimit.ENGINES)

    def closed(self, caller: Caller) -> None:
        self._open.pop(caller, None)

    def _make_places(self, num_wanted: int) -> None:
        cleared = self._abort(places_to_clear(self._places(), num_wanted + self._max_connections // EXTRA_SHARE))
        if cleared:
            self._on_closed(f"more than {self._max_connections} connections: {cleared} were closed")

    def _make_room(self, address: str, num_bytes: int, num_needed: int) -> None:
        calls = self._calls
        if may_ask(calls.held_bytes, address, num_bytes, num_needed):
            num_spare = calls.max_bytes // EXTRA_SHARE
            cleared = self._abort(places_to_empty(self._places(), address, num_bytes, num_needed, num_spare))
            if cleared:
                self._on_closed(f"no room for a call of {address}: {cleared} connections that held more were closed")

    def _places(self) -> list[CallerPlace]:
        rooms = enumerate(self._open.items())
        return [CallerPlace(number, room.address, one.is_in_use, room.used_bytes) for number, (one, room) in rooms]

    def _abort(self, numbers: list[int]) -> int:
        """Closes these connections. Returns how many."""
        callers = list(self._open) if numbers else []
        for number in numbers:
            self._open.pop(callers[number]).close()
            callers[number].abort()
        return len(numbers)


def places_for(max_clients: int) -> int:
    """How many connections there may be: one for each client's request, and the spare ones."""
    return max_clients + max(MIN_SPARE, max_clients // CLIENTS_PER_SPARE)
