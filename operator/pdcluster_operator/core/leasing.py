"""The rules that let one of several candidates for a Lease act. Reads no clock and writes nothing.

    standby --the holder gave it up, or its record did not change for the duration on our clock--> write our name
    leader  --every retry period-----------------------------------------------------------------> renew
    leader  --no renewal for renew_s, counted from before the last good one was sent-------------> standby

Borrowed from client-go 0.35 ``leaderelection``: clocks of two machines are never compared. A standby counts from the
time when it first saw a record. A leader counts from before it sent the record, so from before a standby could see it.
So there are never two leaders, as long as no clock runs more than duration_s / renew_s times as fast as another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds. ``duration_s``: how long others wait for a leader that does not renew; ``renew_s``: how long the leader
    acts without renewing; ``retry_s``: between two looks.

    Raises:
        ValueError: The times leave no time to renew, or would let two candidates lead.
    """

    duration_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s * 2 <= self.renew_s < self.duration_s:
            raise ValueError(
                f"lease duration {self.duration_s:g} s, renewal {self.renew_s:g} s, retry {self.retry_s:g} s: "
                "give a duration above the renewal, and a renewal of two retries or more"
            )


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The content of a Lease. ``renewed``: text that every renewal changes; it is not read as a time.

    ``holder``: empty if the last holder gave the Lease back.
    """

    holder: str
    duration_s: float
    renewed: str
    transitions: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate's view. ``seen_at`` and ``leads_until``: seconds of its own clock."""

    identity: str
    times: LeaseTimes
    seen: LeaseRecord | None = None
    seen_at: float = NEVER
    leads_until: float = NEVER

    def leads(self, now: float) -> bool:
        """Whether the candidate may act now."""
        return now < self.leads_until

    def observed(self, record: LeaseRecord, now: float) -> Candidate:
        """The candidate after it has read the Lease. ``now``: a time after the answer."""
        return self if record == self.seen else replace(self, seen=record, seen_at=now)

    def may_write(self, now: float) -> bool:
        """Whether to write our name over the record that was seen last."""
        if self.seen is None or self.seen.holder in ("", self.identity):
            return True
        # The longer one counts: while the operator itself is rolled, replicas may have different settings.
        return now >= self.seen_at + max(self.seen.duration_s, self.times.duration_s)

    def claim(self, renewed: str) -> LeaseRecord:
        """The record to write."""
        before = self.seen
        is_new = before is not None and before.holder != self.identity
        num_transitions = (before.transitions if before else 0) + is_new
        return LeaseRecord(self.identity, self.times.duration_s, renewed, num_transitions)

    def written(self, record: LeaseRecord, *, began: float, now: float) -> Candidate:
        """The candidate after ``record`` was stored for certain. ``began``: a time before it was sent."""
        return replace(self, seen=record, seen_at=now, leads_until=began + self.times.renew_s)

    def resigned(self) -> Candidate:
        """The candidate after it has stopped acting. The record of ``parting`` may be written only after that."""
        return replace(self, leads_until=NEVER)

    def parting(self, renewed: str) -> LeaseRecord | None:
        """The record that gives the Lease back, so that others need not wait; None: the Lease is not ours."""
        if self.seen is None or self.seen.holder != self.identity:
            return None
        return replace(self.seen, holder="", renewed=renewed)
