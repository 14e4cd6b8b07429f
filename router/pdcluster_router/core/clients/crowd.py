"""Chooses connections to the internal port that make room: for another connection, or for a call's bytes.

The address with the most connections in no use loses its oldest one, again and again until there is room. So a crowd
from one machine, or from a few, makes room for itself, and an engine keeps its few connections. A connection is in use
while a call waits there for its outcome: only holders of the secret get that far. Such connections are never chosen.

For bytes, the address that holds the most of them makes room. It must hold over ``TIMES_MORE`` times as many as the
address that asks would have: two addresses that hold about the same do not push each other out in turn.

Known engines have no places of their own. Their calls may come from other addresses than those at which the router
reaches them (``requests/reservation.py``), and two of these addresses may be one machine's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

TIMES_MORE: Final = 2
"""An address makes room for another one if it holds over this many times the bytes that the other would have."""


@dataclass(frozen=True, slots=True)
class CallerPlace:
    """One connection. ``number``: any number that names it. ``num_bytes``: the bytes of the room that it holds."""

    number: int
    address: str
    is_in_use: bool
    num_bytes: int = 0


def places_to_clear(places: Iterable[CallerPlace], num_wanted: int) -> list[int]:
    """The numbers of ``num_wanted`` places in no use, or of all such places if they are fewer. ``places``: the oldest
    first."""
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


def _idle_by_address(places: Iterable[CallerPlace]) -> Iterable[deque[int]]:
    idle: dict[str, deque[int]] = {}
    for place in places:
        if not place.is_in_use:
            idle.setdefault(place.address, deque()).append(place.number)
    return idle.values()


def may_ask(held: Mapping[str, int], asker: str, num_bytes: int, num_needed: int) -> bool:
    """Whether others hold enough to make room for ``num_needed`` of ``num_bytes`` that ``asker`` wants. ``held``: bytes
    by address. A quick answer before all places are looked at."""
    most = held.get(asker, 0) + num_bytes
    over = [one - most for one in held.values() if one > most]
    return bool(over) and max(over) > (TIMES_MORE - 1) * most and sum(over) >= num_needed


def places_to_empty(
    places: Iterable[CallerPlace], asker: str, num_bytes: int, num_needed: int, num_spare: int = 0
) -> list[int]:
    """The numbers of places that hold ``num_needed`` bytes, and ``num_spare`` more if possible; empty if they hold
    fewer.

    The address with the most bytes gives its oldest place, again and again, as long as it holds more than ``asker``
    would with its ``num_bytes``. ``places``: the oldest first.
    """
    most, by_address = num_bytes, dict[str, deque[CallerPlace]]()
    for place in places:
        if place.address == asker:
            most += place.num_bytes
        elif place.num_bytes and not place.is_in_use:
            by_address.setdefault(place.address, deque()).append(place)
    heap = [(-sum(place.num_bytes for place in own), own[0].number, own) for own in by_address.values()]
    heapq.heapify(heap)
    if not heap or -heap[0][0] <= TIMES_MORE * most:
        return []
    emptied, num_found = _emptied(heap, most, num_needed + num_spare)
    return emptied if num_found >= num_needed else []


def _emptied(heap: list[tuple[int, int, deque[CallerPlace]]], most: int, num_wanted: int) -> tuple[list[int], int]:
    """The numbers of the emptied places, and the sum of their bytes. ``heap``: the largest holder first; it is used
    up."""
    emptied: list[int] = []
    num_found = 0
    while heap and -heap[0][0] > most and num_found < num_wanted:
        negative, _, own = heapq.heappop(heap)
        place = own.popleft()
        emptied.append(place.number)
        num_found += place.num_bytes
        if own:
            heapq.heappush(heap, (negative + place.num_bytes, own[0].number, own))
    return emptied, num_found
