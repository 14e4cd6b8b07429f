"""Whoever is crowded out, it is no call that waits, and nobody who holds less than others keep."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_router.core.clients.crowd import CallerPlace, places_to_clear

crowds = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60).map(
    lambda drawn_: [CallerPlace(number, *place) for number, place in enumerate(drawn_)]
)


@settings(max_examples=drawn(3000), deadline=None)
@given(crowds, st.integers(0, 70))
def test_the_largest_crowd_makes_room_and_the_oldest_of_it(places: list[CallerPlace], num_wanted: int) -> None:
    cleared = set(numbers := places_to_clear(places, num_wanted))
    idle = [place for place in places if not place.is_in_use]
    assert len(cleared) == len(numbers) == min(num_wanted, len(idle))
    assert cleared <= {place.number for place in idle}
    kept = Counter(place.address for place in idle if place.number not in cleared)
    for address in {place.address for place in idle if place.number in cleared}:
        assert kept[address] >= max(kept.values(), default=0) - 1
        own = [place.number for place in idle if place.address == address]
        assert own[: len(own) - kept[address]] == [number for number in own if number in cleared]
