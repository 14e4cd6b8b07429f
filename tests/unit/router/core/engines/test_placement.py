"""Placement: who may get work, best first."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.breaker import NUM_IN_A_ROW, Breaker, Circuit
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.engines.placement import (
    decode_tiers,
    left_of,
    prefill_tiers,
    proven,
    unpaired_tiers,
    usable_prefills,
)


@dataclass(frozen=True)
class Stands:
    """An engine by a word like ``d1+``: its role, its revision, and one of

        +  healthy        !  not ready any more, healthy    ?  starting    ~  finishing
        -  not healthy    /  the same, not healthy                         x  leaving

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
        return _STATES.get(self.word[2], EngineState.SERVING)

    @property
    def is_healthy(self) -> bool:
        return self.word[2] not in "-/"


_STATES = {
    "!": EngineState.NOT_READY,
    "/": EngineState.NOT_READY,
    "?": EngineState.STARTING,
    "~": EngineState.FINISHING,
    "x": EngineState.LEAVING,
}


def stand(words: str) -> list[Stands]:
    return [Stands(word) for word in words.split()]


def shown(tiers: tuple[list[Stands], ...]) -> list[str]:
    """The tiers, without those that repeat the one before."""
    words = [" ".join(engine.word for engine in tier) for tier in tiers]
    return [tier for index, tier in enumerate(words) if not index or tier != words[index - 1]]


def test_a_request_that_has_failed_goes_where_the_last_request_did_not() -> None:
    well, failed, ejected = stand("p1+ p1+ p1+0")
    failed.breaker.failed(failed.breaker.era, now=0.0)
    assert [engine is well for engine in proven([well, failed, ejected])] == [True]
    assert [engine is failed for engine in proven([failed, ejected])] == [True]
    assert [engine is ejected for engine in proven([ejected])] == [True]
    failed.breaker.succeeded(failed.breaker.era)
    assert len(proven([well, failed, ejected])) == 2


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
        ("p1+ d1? d1~ d1x", []),
        ("p1? d1+", []),
        ("p1+ d1!", ["d1!"]),
        ("p1! d1+", ["d1+"]),
        ("p1+ d1/", ["d1/"]),
        ("p1+ d1+ d1! d1/", ["d1+", "d1+ d1!", "d1+", "d1+ d1! d1/"]),
        ("p1+ d1- d1! d1/", ["d1!", "d1-", "d1- d1! d1/"]),
        ("p1! d1! p2+ d2+", ["d2+", "d1! d2+", "d2+", "d1! d2+"]),
        ("p1! d1+ p2- d2+", ["d1+", "d1+ d2+", "d2+", "d1+ d2+"]),
        ("p1! d2!", []),
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
        ("p1~ p1+", ["p1+", "p1~", "p1+", "p1~"]),
        ("p1~ p1-", ["p1~", "p1-", "p1~"]),
        ("p1~1 p1-", ["p1-", "p1~1"]),
        ("p1+ p1+1", ["p1+", "p1+ p1+1"]),
        ("p1+3 p1+1 p1+2", ["p1+1", "p1+3 p1+1 p1+2"]),
        ("p1+1 p2+", ["p1+1"]),
        ("p1~ p2+", ["p1~"]),
        ("p1? p1x", []),
        ("p1! p1- p1/ p1~", ["p1!", "p1~", "p1-", "p1! p1- p1/", "p1~"]),
        ("p1! p1+", ["p1+", "p1! p1+", "p1+", "p1! p1+"]),
        ("p1+1 p1!", ["p1!", "p1+1", "p1+1 p1!"]),
        ("p1+1 p1!2 p1-", ["p1+1", "p1-", "p1+1 p1-", "p1+1 p1!2 p1-"]),
        ("p2+", []),
    ],
)
def test_prefill_is_of_the_revision_and_one_that_terminates_is_asked_behind_all_others_that_answer(
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
        ("p1+ p1+ d1!", 2),
        ("p1! p1! p1/ d1!", 2),
        ("p1! d1! p2+ d2+", 1),
        ("p1? d1+", 0),
        ("p1- d1- p2! p2! d2!", 2),
        ("p1- p1! p1! d1+", 2),
        ("p1+ d1- p2+ d2+", 1),
        ("p1+ p1! d1!", 2),
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


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("d1+", ["d1+"]),
        ("p1+ d1+ d2+", ["d1+ d2+"]),
        ("d1- d2+", ["d2+", "d1- d2+"]),
        ("d1+1 d2+", ["d2+", "d1+1 d2+"]),
        ("d1+ d1!", ["d1+", "d1+ d1!", "d1+", "d1+ d1!"]),
        ("d1-", ["d1-"]),
        ("d1? d1~ d1x p1+", []),
    ],
)
def test_a_request_that_needs_no_prefill_engine_asks_for_no_pair(engines: str, expected: list[str]) -> None:
    assert shown(unpaired_tiers(stand(engines))) == expected
