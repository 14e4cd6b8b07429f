"""One deliberate bug at a time: the walk finds each, names the broken promise and prints a shortest trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.mutants import MUTANTS, Mutant, receiving_by
from model.plan import Cores
from model.walk import BrokenAt, Walk

SLOW = frozenset(("believes an old done", "fences by time"))
"""Their shortest ways are long: tens of thousands of states."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name in SLOW)) for each in MUTANTS],
)
def test_the_walk_finds_the_bug_and_a_shortest_way_to_it(mutant: Mutant) -> None:
    with receiving_by(mutant.receive), pytest.raises(BrokenAt) as found:
        Walk(mutant.plan, max_states=300_000).run()
    print(f"{mutant.name}: {found.value}")
    assert found.value.invariant == mutant.invariant


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.name))
def test_the_same_plan_without_the_bug_breaks_nothing(mutant: Mutant) -> None:
    Walk(replace(mutant.plan, cores=Cores()), max_states=100_000).run()
