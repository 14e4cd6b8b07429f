"""The policy of least tokens: of a few engines the least, of many the better of two."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.load import FAILED_HALF_LIFE_S, Load
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.core.engines.policies.least_tokens import least_tokens

REQUEST = RequestFacts(b"/v1/completions", b"", parse_body(b"{}"), "")


@dataclass(frozen=True)
class Loaded:
    name: str
    load: Load
    url: str = ""


def loaded(*loads: tuple[int, int]) -> list[Loaded]:
    return [Loaded(str(index), Load(*load)) for index, load in enumerate(loads)]


def choose(engines: list[Loaded], *, now: float, chance: Callable[[], float]) -> Loaded:
    return least_tokens(engines)(REQUEST, now=now, chance=chance)


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
def test_of_a_few_engines_the_least_tokens_win_then_who_has_waited_longest_then_the_first(
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


def test_an_engine_that_fails_at_once_is_not_the_one_with_the_least_to_do() -> None:
    engines = loaded((100, 0), (0, 9))
    engines[1].load.add_failed(200, now=0.0)
    assert choose(engines, now=0.0, chance=lambda: 0.0).name == "0"
    assert choose(engines, now=30.0, chance=lambda: 0.0).name == "1"


def test_a_new_engine_does_not_get_all_that_a_quiet_pool_has_to_do() -> None:
    engines = loaded((0, 1), (0, 2), (0, 0))
    got = Counter[str]()
    for second in range(3, 33):
        engine = choose(engines, now=second, chance=lambda: 0.9)
        engine.load.placed_at = second
        got[engine.name] += 1
    assert got == {"0": 10, "1": 10, "2": 10}
