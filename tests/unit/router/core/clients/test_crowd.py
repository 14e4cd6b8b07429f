"""Which connections make room for others."""

from __future__ import annotations

import pytest

from pdcluster_router.core.clients.crowd import Place, places_to_clear

TABLE: dict[str, tuple[str, int, list[int]]] = {
    "the oldest of the only address": ("aaaa", 2, [0, 1]),
    "the oldest of the largest": ("abbb", 1, [1]),
    "the largest first, then both by turns": ("abbbab", 4, [1, 2, 0, 3]),
    "of equal ones the oldest": ("ba", 1, [0]),
    "none that is in use": ("AaAA", 3, [1]),
    "calls that wait make no crowd": ("AAAAbb", 1, [4]),
    "no more than there are": ("ab", 5, [0, 1]),
    "none": ("", 1, []),
}
"""Addresses in the order in which they came, in capitals where the connection is in use; how many are wanted; which."""


@pytest.mark.parametrize("case", TABLE)
def test_who_makes_room(case: str) -> None:
    addresses, num_wanted, cleared = TABLE[case]
    places = [Place(at, address.lower(), address.isupper()) for at, address in enumerate(addresses)]
    assert places_to_clear(places, num_wanted) == cleared
