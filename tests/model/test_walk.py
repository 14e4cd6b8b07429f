"""Every promise holds in every state of the small scope, and the walk finds each deliberate bug in a core."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import msgspec
import pytest

from model.freeze import Store
from model.mutants import MUTANTS, Mutant, receiving_by
from model.plan import Cores, Plan
from model.scopes import one, small
from model.walk import BrokenAt, Walk
from patience import HANGS_S

HEAVY = {
    ("blocks over time", "idle"),
    ("side by side", "cancel"),
    ("prefill ranks", "write"),
    ("decode ranks", "write"),
}
"""Plans with one fault that have a third of the small scope's states: the others have the same faults."""


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """The cores' shells would log each failure of each branch."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def is_heavy(plan: Plan) -> bool:
    """Two faults together, or many states."""
    return plan.name == "pairs" or any(plan.name == name and plan.faults == one(fault) for name, fault in HEAVY)


def test_the_heavy_plans_are_in_the_small_scope() -> None:
    plans = list(small())
    assert all(any(plan.name == name and plan.faults == one(fault) for plan in plans) for name, fault in HEAVY)


@pytest.mark.timeout(HANGS_S)  # half a minute, of heavy plans five; on a busy machine several times that
@pytest.mark.parametrize(
    "heavy",
    [pytest.param(False, marks=pytest.mark.costly), pytest.param(True, marks=pytest.mark.slow)],
    ids=["light plans", "heavy plans"],
)
def test_every_promise_holds_in_every_state_of_the_small_scope(heavy: bool, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [Walk(plan).run() for plan in small() if is_heavy(plan) is heavy]
    assert figures
    assert all(seen.is_whole and seen.num_terminal for seen in figures)
    with capsys.disabled():
        print(f"\n{sum(seen.num_states for seen in figures):,} states in {len(figures)} plans")


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


class ModuleOfMissingLibrary(ModuleType):
    """As transformers' old names of its modules: asked for any name, they import what is not installed."""

    def __getattr__(self, name: str) -> object:
        raise ModuleNotFoundError(f"asked for {name}")


def test_a_copy_asks_no_other_module(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"an_old_name": ModuleOfMissingLibrary("an_old_name")} | sys.modules
    monkeypatch.setattr(sys, "modules", modules)
    store = Store()
    number = store.intern(part := {"seal": msgspec.UNSET})
    copy = store.copy(number)
    assert copy == part
    assert copy is not part
