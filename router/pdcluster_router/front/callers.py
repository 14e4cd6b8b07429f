"""How many connections to the internal port there may be: of engines, probes, monitoring and the operator.

    within max_internal_connections    served
    above                              as many make room, and a few more; core/clients/crowd.py says which

A new connection is never turned away, for it may be an engine's. A request of a client may hold one call of decode's;
the spare places are for all other callers. So some connections are in no use even when each client waits for prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from pdcluster_router.core.clients.crowd import Place, places_to_clear
from pdcluster_router.http.handshakes import Abortable

CLIENTS_PER_SPARE: Final = 4
"""One spare place for so many clients."""
MIN_SPARE: Final = 16
"""A kubelet, a Prometheus or two, the operator and somebody with a terminal, each with more than one connection."""
EXTRA_SHARE: Final = 32
"""One of so many makes room besides, so that not each connection of a crowd has all others looked at: 1 us for each."""


class Caller(Abortable, Protocol):
    """A connection to the internal port, as ``Callers`` needs it."""

    @property
    def is_in_use(self) -> bool:
        """Whether a call that is believed, or a whole request for a page, waits here for its answer."""
        ...


class Callers:
    """The open connections of one router's internal port. Event loop only."""

    def __init__(self, max_connections: int, on_closed: Callable[[str], None]) -> None:
        """``on_closed``: called with the reason each time that some made room."""
        self._max_connections = max_connections
        self._on_closed = on_closed
        self._open: dict[Caller, str] = {}
        """Their addresses; the oldest connection first."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def opened(self, caller: Caller, address: str) -> bool:
        """Returns True: each is served. Call ``closed`` for each; a second time does nothing."""
        if len(self._open) >= self._max_connections:
            self._make_room(len(self._open) - self._max_connections + 1)
        self._open[caller] = address
        return True

    def closed(self, caller: Caller) -> None:
        self._open.pop(caller, None)

    def _make_room(self, num_wanted: int) -> None:
        callers = list(self._open)
        places = (Place(number, self._open[caller], caller.is_in_use) for number, caller in enumerate(callers))
        cleared = places_to_clear(places, num_wanted + self._max_connections // EXTRA_SHARE)
        for number in cleared:
            del self._open[callers[number]]
            callers[number].abort()
        if cleared:
            self._on_closed(f"more than {self._max_connections} connections: {len(cleared)} were closed")


def places_for(max_clients: int) -> int:
    """How many connections there may be: one for each client's request, and the spare ones."""
    return max_clients + max(MIN_SPARE, max_clients // CLIENTS_PER_SPARE)
