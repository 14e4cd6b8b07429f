"""Placement: who may get work, best first, and the engine with the least to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pdcluster_protocol.labels import Role
from pdcluster_router.core.membership import State
from pdcluster_router.core.placement import (
    LeastTokens,
    Load,
    decode_tiers,
    left_of,
    prefill_tiers,
    usable_prefills,
)


@dataclass(frozen=True)
class Stands:
    """An engine by a word like ``d1+``: its role, its revision, and + healthy, - not, ! not ready, ~ finishing."""

    word: str

    @property
    def role(self) -> Role:
        return Role.PREFILL if self.word[0] == "p" else Role.DECODE

    @property
    def revision(self) -> str:
        return self.word[1]

    @property
    def state(self) -> State:
        return {"!": State.NOT_READY, "~": State.FINISHING, "x": State.LEAVING}.get(self.word[2], State.SERVING)

    @property
    def is_healthy(self) -> bool:
        return self.word[2] != "-"


def stand(words: str) -> list[Stands]:
    return [Stands(word) for word in words.split()]


def shown(tiers: tuple[list[Stands], ...]) -> list[str]:
    return [" ".join(engine.word for engine in tier) for tier in tiers]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([Load(5, 0)], 0),
        ([Load(5, 0), Load(4, 9)], 1),
        ([Load(4, 3), Load(4, 2), Load(4, 2)], 1),
    ],
)
def test_the_least_tokens_win_then_the_fewest_requests_then_the_first(loads: list[Load], expected: int) -> None:
    assert LeastTokens().choose(loads) == expected


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("p1+ d1+", ["d1+", "d1+", "d1+"]),
        ("p1+ d1+ d1-", ["d1+", "d1+", "d1+ d1-"]),
        ("p1- d1+ d1-", ["d1+", "d1+ d1-"]),
        ("p1- d1-", ["d1-"]),
        ("p1+ d1+ p2+ d2+", ["d1+ d2+", "d1+ d2+", "d1+ d2+"]),
        ("p1+ d1+ p2- d2+", ["d1+", "d1+ d2+", "d1+ d2+"]),
        ("p1+ d1+ d2+", ["d1+", "d1+", "d1+"]),
        ("p1+ d2+", []),
        ("p1+ d1! d1~ d1x", []),
        ("p1! d1+", []),
        ("p1~ d1+", []),
        ("p1~ d1+ p2+ d2-", ["d2-"]),
        ("", []),
    ],
)
def test_decode_is_chosen_among_serving_engines_of_revisions_that_have_both_roles(
    engines: str, expected: list[str]
) -> None:
    assert shown(decode_tiers(stand(engines))) == expected


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("p1+ p1- p2+ d1+", ["p1+", "p1+ p1-"]),
        ("p1- p2+", ["p1-"]),
        ("p1~ p1+", ["p1+", "p1+", "p1~"]),
        ("p1~ p2+", ["p1~"]),
        ("p1! p1x", []),
        ("p2+", []),
    ],
)
def test_prefill_is_of_the_revision_and_one_that_terminates_is_the_last_to_be_asked(
    engines: str, expected: list[str]
) -> None:
    assert shown(prefill_tiers(stand(engines), "1")) == expected


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("p1+ p1+ d1+", 2),
        ("p1+ p1- p1! p1~ d1-", 1),
        ("p1+ p2+ d2+", 1),
        ("p1+ d1~", 0),
    ],
)
def test_admission_counts_prefill_engines_that_new_requests_can_reach(engines: str, expected: int) -> None:
    assert len(usable_prefills(stand(engines))) == expected


@pytest.mark.parametrize(
    ("excluded", "expected"),
    [([], ["a", "b"]), (["a"], ["b"]), (["a", "b"], ["c"]), (["a", "b", "c"], [])],
)
def test_a_later_tier_counts_when_all_of_an_earlier_one_are_excluded(excluded: list[str], expected: list[str]) -> None:
    assert list(left_of((["a", "b"], ["a", "b", "c"]), excluded)) == expected
