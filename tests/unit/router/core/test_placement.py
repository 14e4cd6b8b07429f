"""Placement: who may get work, best first, and the one of two that has less to do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from pdcluster_protocol.labels import Role
from pdcluster_router.core.breaker import NUM_IN_A_ROW, Breaker, Circuit
from pdcluster_router.core.load import FAILED_HALF_LIFE_S, Load
from pdcluster_router.core.membership import EngineState
from pdcluster_router.core.placement import (
    choose,
    decode_tiers,
    left_of,
    prefill_tiers,
    proven,
    usable_prefills,
)


@dataclass(frozen=True)
class Stands:
    """An engine by a word like ``d1+``: its role, its revision, and + healthy, - not, ! not ready, ~ finishing.

    A digit at its end: ejected at that second.
    """

    word: str
    breaker: Breaker = field(default_factory=Breaker, compare=False)

    def __post_init__(self) -> None:
        for _ in range(NUM_IN_A_ROW if self.word[3:] else 0):
            self.breaker.failed(self.breaker.era, now=float(self.word[3:]))

    @property
    def role(self) -> Role:
        return Role.PREFILL if self.word[0] == "p" else Role.DECODE

    @property
    def revision(self) -> str:
        return self.word[1]

    @property
    def state(self) -> EngineState:
        return {"!": EngineState.NOT_READY, "~": EngineState.FINISHING, "x": EngineState.LEAVING}.get(
            self.word[2], EngineState.SERVING
        )

    @property
    def is_healthy(self) -> bool:
        return self.word[2] != "-"


def stand(words: str) -> list[Stands]:
    return [Stands(word) for word in words.split()]


def shown(tiers: tuple[list[Stands], ...]) -> list[str]:
    """The tiers, without those that repeat the one before."""
    words = [" ".join(engine.word for engine in tier) for tier in tiers]
    return [tier for index, tier in enumerate(words) if not index or tier != words[index - 1]]


@dataclass(frozen=True)
class Loaded:
    name: str
    load: Load


def loaded(*loads: tuple[int, int]) -> list[Loaded]:
    return [Loaded(str(index), Load(*load)) for index, load in enumerate(loads)]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([(5, 0)], "0"),
        ([(5, 0), (4, 9)], "1"),
        ([(4, 3), (4, 2)], "1"),
        ([(4, 2), (4, 2)], "0"),
        ([(4, 2), (9, 1), (4, 1), (4, 1)], "2"),
    ],
)
def test_of_a_few_engines_the_least_tokens_win_then_the_fewest_requests_then_the_first(
    loads: list[tuple[int, int]], expected: str
) -> None:
    assert choose(loaded(*loads), now=0.0, chance=lambda: 0.9).name == expected


@pytest.mark.parametrize("which", [0, 1])
def test_what_failed_there_counts_for_a_while(which: int) -> None:
    engines = loaded((0, 0), (0, 0))
    engines[which].load.add_failed(1000, now=5.0)
    engines[1 - which].load.outstanding_tokens = 100
    chosen = [choose(engines, now=5.0 + passed, chance=lambda: 0.9).name for passed in (0.0, 10 * FAILED_HALF_LIFE_S)]
    assert chosen == [str(1 - which), str(which)]


@pytest.mark.parametrize(
    ("chances", "expected"),
    [((0.0, 0.0), "1"), ((0.0, 0.99), "4"), ((0.99, 0.0), "4"), ((0.99, 0.99), "4"), ((0.5, 0.5), "3")],
)
def test_of_many_engines_two_that_differ_are_compared(chances: tuple[float, float], expected: str) -> None:
    drawn = iter(chances)
    engines = loaded((9, 0), (7, 0), (5, 0), (3, 0), (1, 0))
    assert choose(engines, now=0.0, chance=lambda: next(drawn)).name == expected


def test_work_that_never_ends_spreads_evenly_over_many_engines() -> None:
    engines = loaded(*[(0, 0)] * 64)
    chance = random.Random(7).random
    for _ in range(64 * 50):
        engine = choose(engines, now=0.0, chance=chance)
        engine.load.outstanding_tokens += 100
    tokens = [engine.load.outstanding_tokens for engine in engines]
    assert max(tokens) - min(tokens) <= 10 * 100  # Without the choice of two: about 40 * 100.


def test_the_most_loaded_engine_of_many_is_never_chosen() -> None:
    engines = loaded(*[(number, 0) for number in range(16)])
    chance = random.Random(7).random
    chosen = Counter(choose(engines, now=0.0, chance=chance).name for _ in range(2000))
    assert "15" not in chosen
    assert len(chosen) == 15


def test_a_request_that_has_failed_goes_where_the_last_request_did_not() -> None:
    well, failed, ejected = stand("p1+ p1+ p1+0")
    failed.breaker.failed(failed.breaker.era, now=0.0)
    assert [engine is well for engine in proven([well, failed, ejected])] == [True]
    assert [engine is failed for engine in proven([failed, ejected])] == [True]
    assert [engine is ejected for engine in proven([ejected])] == [True]
    failed.breaker.succeeded(failed.breaker.era)
    assert len(proven([well, failed, ejected])) == 2


def test_an_engine_that_fails_at_once_is_not_the_one_with_the_least_to_do() -> None:
    engines = loaded((100, 0), (0, 9))
    engines[1].load.add_failed(200, now=0.0)
    assert choose(engines, now=0.0, chance=lambda: 0.0).name == "0"
    assert choose(engines, now=30.0, chance=lambda: 0.0).name == "1"


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("p1+ d1+", ["d1+"]),
        ("p1+ d1+ d1-", ["d1+", "d1+ d1-"]),
        ("p1- d1+ d1-", ["d1+", "d1+ d1-"]),
        ("p1- d1-", ["d1-"]),
        ("p1+ d1+ p2+ d2+", ["d1+ d2+"]),
        ("p1+ d1+ p2- d2+", ["d1+", "d1+ d2+"]),
        ("p1+ d1+ d2+", ["d1+"]),
        ("p1+ d1+ d1+1", ["d1+", "d1+ d1+1"]),
        ("p1+ d1+2 d1+1", ["d1+1", "d1+2 d1+1"]),
        ("p1+ d1- d1+1", ["d1+1", "d1-", "d1- d1+1"]),
        ("p1+ d1+1 d1+1 p2+ d2+", ["d2+", "d1+1 d1+1 d2+"]),
        ("p1+1 d1+ p2+ d2+", ["d2+", "d1+ d2+"]),
        ("p1+1 d1+", ["d1+"]),
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
        ("p1~ p1+", ["p1+", "p1~"]),
        ("p1+ p1+1", ["p1+", "p1+ p1+1"]),
        ("p1+3 p1+1 p1+2", ["p1+1", "p1+3 p1+1 p1+2"]),
        ("p1+1 p2+", ["p1+1"]),
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
        ("p1+ p1+1 d1+", 1),
        ("p1+2 p1+1 d1+", 1),
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


def test_a_request_that_has_failed_once_tries_no_engine_out_while_there_is_a_proven_one() -> None:
    engines = stand("p1+1 p1+")
    engines[0].breaker.wake(now=5.0)
    assert engines[0].breaker.circuit is Circuit.HALF_OPEN
    assert proven(engines) == engines[1:]
    assert proven(engines[:1]) == engines[:1]
