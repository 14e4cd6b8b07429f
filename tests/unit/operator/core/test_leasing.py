"""Stories of one Lease and its candidates."""

from __future__ import annotations

import pytest

from pdcluster_operator.core.leasing import Candidate, LeaseRecord, LeaseTimes

TIMES = LeaseTimes(15.0, 10.0, 2.0)


def standby(record: LeaseRecord | None = None, at: float = 0.0) -> Candidate:
    candidate = Candidate("me", TIMES)
    return candidate if record is None else candidate.observed(record, at)


def test_a_lease_that_is_not_there_is_taken_at_once() -> None:
    candidate = standby()
    assert candidate.may_write(0.0)
    record = candidate.claim("t1")
    assert record == LeaseRecord("me", 15.0, "t1", 0)
    leader = candidate.written(record, began=5.0, now=6.0)
    assert leader.leads(14.9)
    assert not leader.leads(15.0)  # From before it was sent, not from the answer.


def test_a_record_that_changes_keeps_a_standby_waiting_and_one_that_stands_still_does_not() -> None:
    candidate = standby(LeaseRecord("other", 15.0, "t1"), 0.0)
    assert not candidate.may_write(14.9)
    renewed = candidate.observed(LeaseRecord("other", 15.0, "t2"), 14.9)
    assert not renewed.may_write(29.8)
    assert renewed.may_write(29.9)
    assert candidate.observed(LeaseRecord("other", 15.0, "t1"), 14.9).may_write(15.0)  # The same again is no news.


def test_the_longer_duration_of_both_counts() -> None:
    assert not standby(LeaseRecord("other", 60.0, "t1")).may_write(30.0)
    assert not standby(LeaseRecord("other", 1.0, "t1")).may_write(14.0)


def test_a_lease_that_was_given_back_is_taken_at_once() -> None:
    candidate = standby(LeaseRecord("", 15.0, "t1", 3))
    assert candidate.may_write(0.0)
    assert candidate.claim("t2") == LeaseRecord("me", 15.0, "t2", 4)


def test_a_takeover_counts_as_a_transition_and_a_renewal_does_not() -> None:
    taken = standby(LeaseRecord("other", 15.0, "t1", 7)).claim("t2")
    assert taken.transitions == 8
    assert standby(taken).claim("t3").transitions == 8


def test_a_leader_that_resigns_stops_first_and_then_says_so() -> None:
    leader = standby().written(LeaseRecord("me", 15.0, "t1", 2), began=0.0, now=0.0)
    gone = leader.resigned()
    assert not gone.leads(0.0)
    assert gone.parting("t2") == LeaseRecord("", 15.0, "t2", 2)


def test_who_does_not_hold_the_lease_gives_nothing_back() -> None:
    assert standby().parting("t") is None
    assert standby(LeaseRecord("other", 15.0, "t1")).parting("t") is None


@pytest.mark.parametrize("times", [(10.0, 10.0, 2.0), (15.0, 10.0, 6.0), (15.0, 10.0, 0.0)])
def test_times_that_would_let_two_lead_or_leave_no_time_to_renew_are_refused(
    times: tuple[float, float, float],
) -> None:
    with pytest.raises(ValueError, match="give a duration above the renewal"):
        LeaseTimes(*times)
