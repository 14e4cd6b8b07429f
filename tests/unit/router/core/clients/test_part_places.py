"""How many parts of divided requests there may be at a time."""

from __future__ import annotations

from pdcluster_router.core.clients.part_places import PartPlaces


def test_parts_take_a_quarter_of_the_places_and_one_has_its_clients() -> None:
    places = PartPlaces(40)
    assert not places.take(12)
    assert [places.take(6), places.take(7), places.take(6)] == [True, False, True]
    assert places.num_taken == 10
    places.give_back(6)
    assert [places.num_taken, places.take(7), places.take(6)] == [5, False, True]
