"""When a target is verified again, and what is said of it meanwhile."""

from __future__ import annotations

from pdcluster_operator.core.seen.observed import VerificationResult
from pdcluster_operator.core.status.pool_status import Verification
from pdcluster_operator.core.verifications import PATIENCE, TargetVerifications, VerificationEnd

FAILED = VerificationResult(Verification.FAILED, "no KV")


def test_only_one_request_is_under_way() -> None:
    known = TargetVerifications("t", 0.0)
    assert known.may_start(0.0)
    assert not known.started().may_start(1e9)


def test_a_pass_is_a_pass() -> None:
    assert TargetVerifications("t", 0.0, num_failures=3, result=FAILED).ended(
        VerificationEnd.PASSED, "", 5.0, 0.0
    ).result == (VerificationResult(Verification.PASSED))


def test_failures_are_told_at_once_and_tried_again_later_and_later() -> None:
    known, waits = TargetVerifications("t", 0.0), []
    for _ in range(9):
        known = known.started().ended(VerificationEnd.FAILED, "no KV", 0.0, 0.999999)
        assert known.result == FAILED
        assert known.due_at is not None
        waits.append(round(known.due_at))
    assert waits == [4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_a_lack_of_answers_is_a_verdict_only_when_it_goes_on() -> None:
    known = TargetVerifications("t", 0.0)
    for _ in range(PATIENCE - 1):
        known = known.ended(VerificationEnd.UNANSWERED, "no KV", 0.0, 0.0)
        assert known.result is None
    assert known.ended(VerificationEnd.UNANSWERED, "no KV", 0.0, 0.0).result == FAILED


def test_a_failure_stays_known_while_no_answer_comes() -> None:
    known = TargetVerifications("t", 0.0).ended(VerificationEnd.FAILED, "no KV", 0.0, 0.0)
    assert known.ended(VerificationEnd.UNANSWERED, "away", 0.0, 0.0).result == FAILED
