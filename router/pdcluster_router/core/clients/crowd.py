"""The choice of connections to the internal port that make room for others, when there are too many.

Of the address that has the most connections in no use, the oldest goes; and again, until there is room. So a crowd from
one machine, or from a few, makes room for itself, and an engine keeps the few that it has. A connection is in use while
a call waits there for its outcome: only holders of the secret get that far. Such connections are never chosen.

Known engines have no places of their own. Their calls may come from other addresses than those at which the router
reaches them (``requests/reservation.py``), and two of these addresses may be one machine's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One connection. ``number``: the caller's own name for it."""

    number: int
    address: str
    is_in_use: bool


def places_to_clear(places: Iterable[Place], num_wanted: int) -> list[int]:
    """The numbers of ``num_wanted`` places, or of all that are in no use. ``places``: the oldest first."""
    idle = _idle_by_address(places)
    crowds = [(-len(numbers), numbers[0], numbers) for numbers in idle]
    heapq.heapify(crowds)
    cleared: list[int] = []
    while crowds and len(cleared) < num_wanted:
        _, _, numbers = heapq.heappop(crowds)
        cleared.append(numbers.popleft())
        if numbers:
            heapq.heappush(crowds, (-len(numbers), numbers[0], numbers))
    return cleared


def _idle_by_address(places: Iterable[Place]) -> Iterable[deque[int]]:
    idle: dict[str, deque[int]] = {}
    for place in places:
        if not place.is_in_use:
            idle.setdefault(place.address, deque()).append(place.number)
    return idle.values()
