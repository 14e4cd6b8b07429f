"""When a target is verified again, and what is said of it meanwhile."""

from __future__ import annotations

from pdcluster_operator.core.seen.observed import VerificationResult
from pdcluster_operator.core.status.pool_status import Verification
from pdcluster_operator.core.trials import PATIENCE, TargetTrials, TrialVerdict

FAILED = VerificationResult(Verification.FAILED, "no KV")


def test_only_one_request_is_under_way() -> None:
    trial = TargetTrials("t", 0.0)
    assert trial.may_start(0.0)
    assert not trial.started().may_start(1e9)


def test_a_pass_is_a_pass() -> None:
    assert TargetTrials("t", 0.0, num_failures=3, result=FAILED).ended(TrialVerdict.PASSED, "", 5.0, 0.0).result == (
        VerificationResult(Verification.PASSED)
    )


def test_failures_are_told_at_once_and_tried_again_later_and_later() -> None:
    trial, waits = TargetTrials("t", 0.0), []
    for _ in range(9):
        trial = trial.started().ended(TrialVerdict.FAILED, "no KV", 0.0, 0.999999)
        assert trial.result == FAILED
        assert trial.due_at is not None
        waits.append(round(trial.due_at))
    assert waits == [4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_that_nobody_answered_is_a_verdict_only_when_it_goes_on() -> None:
    trial = TargetTrials("t", 0.0)
    for _ in range(PATIENCE - 1):
        trial = trial.ended(TrialVerdict.UNANSWERED, "no KV", 0.0, 0.0)
        assert trial.result is None
    assert trial.ended(TrialVerdict.UNANSWERED, "no KV", 0.0, 0.0).result == FAILED


def test_a_failure_stays_known_while_nobody_answers() -> None:
    trial = TargetTrials("t", 0.0).ended(TrialVerdict.FAILED, "no KV", 0.0, 0.0)
    assert trial.ended(TrialVerdict.UNANSWERED, "away", 0.0, 0.0).result == FAILED
