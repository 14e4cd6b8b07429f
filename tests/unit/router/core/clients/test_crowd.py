"""Which connections make room for others."""

from __future__ import annotations

import pytest

from pdcluster_router.core.clients.crowd import CallerPlace, may_ask, places_to_clear, places_to_empty

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
    places = [CallerPlace(at, address.lower(), address.isupper()) for at, address in enumerate(addresses)]
    assert places_to_clear(places, num_wanted) == cleared


BYTES: dict[str, tuple[str, int, int, list[int]]] = {
    "the oldest of the only address": ("a3 a3 a3", 1, 1, [0]),
    "as many as it takes": ("a3 a3 a3", 1, 4, [0, 1]),
    "the address with the most bytes, not with the most places": ("a1 a1 a1 b9", 1, 1, [3]),
    "the largest first, then both by turns": ("a3 b2 a3 b2 b2 b2", 1, 8, [1, 0, 3, 4]),
    "none while the largest has no more than twice as many": ("a2 b1", 1, 1, []),
    "it goes down to what the asker would have": ("a2 a2 a2", 2, 4, [0, 1]),
    "none if they are not enough": ("a2 a2 a2", 2, 5, []),
    "none that is in use": ("A9 a3 A9", 1, 3, [1]),
    "none that holds nothing": ("a0 a0 a9", 1, 8, [2]),
    "none of the asker's own": ("x9 x9", 1, 1, []),
    "what the asker has counts": ("a9 x4", 1, 1, []),
    "none": ("", 1, 1, []),
}
"""Address, in capitals where the connection is in use, and bytes, in the order in which they came; how many bytes ``x``
asks for, and how many of them have no room; which places are emptied."""


@pytest.mark.parametrize("case", BYTES)
def test_whose_bytes_make_room(case: str) -> None:
    words, num_bytes, num_needed, emptied = BYTES[case]
    places = [
        CallerPlace(at, word[0].lower(), word[0].isupper(), int(word[1:])) for at, word in enumerate(words.split())
    ]
    assert places_to_empty(places, "x", num_bytes, num_needed) == emptied
    held: dict[str, int] = {}
    for place in places:
        held[place.address] = held.get(place.address, 0) + place.num_bytes
    assert may_ask(held, "x", num_bytes, num_needed) or not emptied


def test_a_few_bytes_more_are_found_so_that_not_each_call_has_all_places_looked_at() -> None:
    places = [CallerPlace(at, "a", is_in_use=False, num_bytes=1) for at in range(100)]
    assert places_to_empty(places, "x", 1, 1, num_spare=9) == list(range(10))
    assert len(places_to_empty(places, "x", 1, 1, num_spare=500)) == 99


@pytest.mark.parametrize(
    ("held", "num_needed", "is_worth_it"),
    [
        ({"a": 20}, 10, True),
        ({"a": 18}, 9, False),
        ({"a": 20}, 12, False),
        ({"a": 20, "x": 1}, 9, False),
        ({}, 1, False),
    ],
)
def test_places_are_looked_at_only_where_that_may_help(
    held: dict[str, int], num_needed: int, *, is_worth_it: bool
) -> None:
    assert may_ask(held, "x", 9, num_needed) == is_worth_it
