"""Bounds the connections to the client port. ``callers.py`` bounds those to the internal port.

    within max_connections          served
    above, up to twice as many      guests: a probe of our health is served, all else gets a 503
    above that                      the guest that has been silent the longest makes room for the newest

A request holds up to four descriptors: its client, decode's call to the metaserver, and a connection to each engine.
A guest holds one. A quarter of one for each client is for other callers of the internal port. So about a fifth of the
descriptors is for clients, a fifth for guests, and the rest for engines. Each further part of a request needs about as
many as a request, so it takes the place of a client.
"""

from __future__ import annotations

import resource
from typing import Final

from pdcluster_router.core.clients.part_places import PartPlaces
from pdcluster_router.front.callers import CLIENTS_PER_SPARE
from pdcluster_router.http.handshakes import Abortable

DESCRIPTORS_PER_CLIENT: Final = 5 + 1 / CLIENTS_PER_SPARE
"""Four for a request, one for a guest (there may be as many guests as clients), and a share of the spare places."""
OUR_DESCRIPTORS: Final = 32
"""Descriptors of the process itself: its log, its ports, the loop's, files that it reads. 18 are open at the start."""
MAX_BACKLOG: Final = 2048
"""uvicorn's default."""
BACKLOG_SHARE: Final = 16
"""New connections to one port take a sixteenth of the descriptors at most before the loop counts them."""
NUM_PORTS: Final = 2
MAX_DEFAULT: Final = 16_384
"""The default of ``max_engine_connections`` too. An idle connection costs 7 KiB."""


class Clients:
    """The open connections of one router's client port. Event loop only."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.parts = PartPlaces(max_connections)
        self._num_members = 0
        self._silent: dict[Abortable, None] = {}
        """Guests that have sent no request, the oldest first."""
        self._speaking: set[Abortable] = set()
        """Guests that have sent a request."""

    @property
    def num_open(self) -> int:
        return self._num_members + len(self._silent) + len(self._speaking)

    def opened(self, connection: Abortable, address: str = "") -> bool:  # noqa: ARG002  # as ``Callers``
        """Counts ``connection``. Returns False if it is a guest. Call ``closed`` once at its end."""
        if self._has_place():
            self._num_members += 1
            return True
        self._silent[connection] = None
        if self.num_open > 2 * self.max_connections:
            next(iter(self._silent)).abort()
        return False

    def may_stay(self, guest: Abortable) -> bool:
        """Ends the limits of a guest that has sent a head, if other clients have left. Returns whether it does."""
        self._silent.pop(guest, None)
        if self._has_place():
            self._speaking.discard(guest)
            self._num_members += 1
            return True
        self._speaking.add(guest)
        return False

    def closed(self, connection: Abortable) -> None:
        if connection in self._silent:
            del self._silent[connection]
        elif connection in self._speaking:
            self._speaking.remove(connection)
        else:
            self._num_members -= 1

    def _has_place(self) -> bool:
        return self._num_members + self.parts.num_taken < self.max_connections


def default_max_connections() -> int:
    """About a fifth of the descriptors that this process may open, without its own and those of ``backlog``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_left = soft - OUR_DESCRIPTORS - NUM_PORTS * backlog()
    return max(1, min(MAX_DEFAULT, int(num_left / DESCRIPTORS_PER_CLIENT)))


def backlog() -> int:
    """The most connections that the kernel keeps for one port. The loop accepts all in one turn, a descriptor each."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(MAX_BACKLOG, soft // BACKLOG_SHARE))
