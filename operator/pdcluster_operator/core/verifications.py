"""Decides when a target is verified, and keeps the result: one request at a time, with longer waits after failures.

Routers come and go, so a router that cannot be reached is a failure only after ``PATIENCE`` requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from pdcluster_operator.core.queueing import RetryPace
from pdcluster_operator.core.seen.observed import VerificationResult
from pdcluster_operator.core.status.pool_status import Verification

PACE: Final = RetryPace(first_s=2.0, most_s=300.0)
"""Seconds between two requests. The waits grow to 300: people mend a pool that cannot transfer, and need longer."""
PATIENCE: Final = 4
"""Requests in a row without an answer until the verification counts as failed: with waits of up to half a minute."""


class VerificationEnd(Enum):
    """The result of one request."""

    PASSED = auto()
    FAILED = auto()
    UNANSWERED = auto()


@dataclass(frozen=True, slots=True)
class TargetVerifications:
    """All requests for one target. ``due_at``: when the next may be sent; None: a request is under way."""

    target: str
    due_at: float | None
    num_failures: int = 0
    num_unanswered: int = 0
    result: VerificationResult | None = None

    def may_start(self, now: float) -> bool:
        return self.due_at is not None and now >= self.due_at

    def started(self) -> TargetVerifications:
        return replace(self, due_at=None)

    def ended(self, verdict: VerificationEnd, error: str, now: float, chance: float) -> TargetVerifications:
        """The verifications after a request has ended. ``chance``: in [0, 1), spreads the next requests."""
        if verdict is VerificationEnd.PASSED:
            return TargetVerifications(self.target, now + PACE.most_s, result=VerificationResult(Verification.PASSED))
        num_unanswered = self.num_unanswered + 1 if verdict is VerificationEnd.UNANSWERED else 0
        is_verdict = not num_unanswered or num_unanswered >= PATIENCE
        return replace(
            self,
            due_at=now + PACE.delay_s(self.num_failures + 1, chance),
            num_failures=self.num_failures + 1,
            num_unanswered=num_unanswered,
            result=VerificationResult(Verification.FAILED, error) if is_verdict else self.result,
        )
