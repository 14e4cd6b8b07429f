"""A bug that is put into a core on purpose must be found by the histories that its laws are held against."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def check_it_is_found(history: type[RuleBasedStateMachine], kind: type, *, num_histories: int, num_steps: int) -> None:
    """``history`` makes its core from its attribute ``kind``. Searches only: the shortest history is of no interest.

    Hypothesis also draws numbers that stand in whichever modules are loaded. Not here: the search took ten times as
    long in a whole run, where all tests are.
    """
    search = settings(
        max_examples=num_histories,
        stateful_step_count=num_steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(HypothesisPhase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    buggy = type("Buggy", (history,), {"kind": kind})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(providers, "_get_local_constants", Constants)
        patched.setattr(providers, "CONSTANTS_CACHE", LRUCache(1024))
        with pytest.raises(AssertionError):
            run_state_machine_as_test(buggy, settings=search)
