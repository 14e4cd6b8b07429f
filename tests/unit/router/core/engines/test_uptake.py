"""When a waiting request leaves an engine that takes up nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pdcluster_router.core.engines.uptake import UptakeWatch

LIMIT_S, MOST_S = 120.0, 30.0


@dataclass
class Played:
    is_free: bool = False
    is_well: bool = True
    num_taken_up: int = 7


@dataclass
class Scene:
    """A request at ``own``, which is looked at each 30 s. ``others``: found one after the other."""

    own: Played
    others: list[Played]

    def __post_init__(self) -> None:
        self.now = 1000.0
        self.num_found = 0
        self.watch = UptakeWatch(self.own, now=self.now)

    def find(self) -> Played | None:
        self.num_found += 1
        return self.others[(self.num_found - 1) % len(self.others)] if self.others else None

    def look(self, after_s: float = 30.0) -> float:
        self.now += after_s
        return self.watch.stuck_s(self.find, now=self.now, limit_s=LIMIT_S, most_s=MOST_S)


def test_it_leaves_after_the_limit_if_another_engine_works() -> None:
    other = Played()
    scene = Scene(Played(), [other])
    for _ in range(3):
        other.num_taken_up += 1
        assert scene.look() == 0.0
    other.num_taken_up += 1
    assert scene.look() == 120.0


def test_it_leaves_for_a_free_engine_that_takes_up_nothing_because_it_is_asked_nothing() -> None:
    scene = Scene(Played(), [Played(is_free=True)])
    assert [scene.look() for _ in range(4)] == [0.0, 0.0, 0.0, 120.0]


@pytest.mark.parametrize("others", [[], [Played()], [Played(), Played()]], ids=["none", "one", "two"])
def test_it_stays_where_no_other_engine_takes_up_anything_either(others: list[Played]) -> None:
    scene = Scene(Played(), others)
    assert not any(scene.look() for _ in range(40))


def test_it_stays_while_its_engine_takes_up_others() -> None:
    scene = Scene(Played(), [Played(is_free=True)])
    for _ in range(40):
        assert scene.look() == 0.0
        assert scene.look() == 0.0
        assert scene.look() == 0.0
        scene.own.num_taken_up += 1


@pytest.mark.parametrize("is_free", [False, True])
def test_it_stays_where_the_other_engine_is_not_well(*, is_free: bool) -> None:
    other = Played(is_free=is_free, is_well=False)
    scene = Scene(Played(), [other])
    for _ in range(8):
        other.num_taken_up += 1
        assert scene.look() == 0.0
    other.is_well = True
    assert (scene.look() > 0) is is_free


def test_another_engine_works_for_as_long_as_the_limit_after_it_has_taken_up_a_request() -> None:
    other = Played()
    scene = Scene(Played(), [other])
    scene.look()
    other.num_taken_up += 1
    assert [scene.look() > 0 for _ in range(6)] == [False, False, True, True, False, False]


def test_time_in_which_the_router_was_stopped_does_not_count() -> None:
    scene = Scene(Played(), [Played(is_free=True)])
    assert scene.look(after_s=3600.0) == 0.0
    assert [scene.look() for _ in range(3)] == [0.0, 0.0, 120.0]


def test_of_two_others_the_one_that_works_is_found() -> None:
    stuck, works = Played(), Played()
    scene = Scene(Played(), [stuck, works])
    left = []
    for _ in range(8):
        works.num_taken_up += 1
        left.append(scene.look())
    assert any(left)


def test_looks_that_come_often_add_up_to_the_same_time() -> None:
    scene = Scene(Played(), [Played(is_free=True)])
    looks = [scene.look(after_s=1.0) for _ in range(130)]
    assert looks.index(120.0) == 119
