"""Every promise holds in every state of the small scope."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from model.plan import Plan
from model.scopes import one, small
from model.walk import Walk

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


@pytest.mark.timeout(900)  # half a minute; on a busy machine several
@pytest.mark.parametrize(
    "heavy", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light plans", "heavy plans"]
)
def test_every_promise_holds_in_every_state_of_the_small_scope(heavy: bool, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [Walk(plan).run() for plan in small() if is_heavy(plan) is heavy]
    assert figures
    assert all(seen.is_whole and seen.num_terminal for seen in figures)
    with capsys.disabled():
        print(f"\n{sum(seen.num_states for seen in figures):,} states in {len(figures)} plans")
