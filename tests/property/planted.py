"""A bug that is put into a core on purpose must be found by the histories that its laws are held against."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def check_it_is_found(history: type[RuleBasedStateMachine], kind: type, *, num_histories: int, num_steps: int) -> None:
    """``history`` makes its core from its attribute ``kind``. Searches only: the shortest history is of no interest."""
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
    with pytest.raises(AssertionError):
        run_state_machine_as_test(buggy, settings=search)
