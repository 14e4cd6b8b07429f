"""One push: what each event makes a prefill rank say, and when its blocks are free."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.sending import Phase, Push, PushKey, Release, Send, SendTimes
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.side_channel import Done, Failed, Fenced, Open

KEY = PushKey(TransferId("t"), Attempt(1))
TIMES = SendTimes(settle_s=1.0, hold_s=30.0)


def new_push() -> Push:
    return Push(KEY, TIMES, deadline=60.0)


def writing_push(planned: int = 10) -> Push:
    push = new_push()
    push.plan(planned, 2, is_last=True)
    push.grant()
    return push


def test_a_push_asks_for_a_grant_first_and_writes_nothing_before_it() -> None:
    push = new_push()
    message = Open(*KEY, BootId("b"), 1000)
    assert push.opening(message) == (Send(message),)
    assert not push.may_write
    push.grant()
    assert push.may_write


def test_done_is_said_once_with_the_acknowledged_bytes_and_the_blocks_are_released() -> None:
    push = writing_push()
    push.submitted()
    push.submitted()
    assert push.written(4, now=1.0) == ()
    assert push.written(6, now=2.0) == (Send(Done(*KEY, 10, 2)), Release())
    assert push.phase is Phase.DONE


def test_a_push_is_not_done_before_its_last_part_is_planned() -> None:
    push = new_push()
    push.plan(4, 2, is_last=False)
    push.grant()
    push.submitted()
    assert push.written(4, now=1.0) == ()
    assert push.plan(0, 2, is_last=True) == (Send(Done(*KEY, 4, 2)), Release())


def test_a_push_without_bytes_is_done_when_granted() -> None:
    push = new_push()
    push.plan(0, 2, is_last=True)
    assert push.grant() == (Send(Done(*KEY, 0, 2)), Release())


def test_giving_up_with_nothing_in_flight_is_fenced_at_once() -> None:
    assert new_push().give_up("why", now=1.0) == (Send(Failed(*KEY, "why", is_fenced=True)), Release())


def test_giving_up_with_a_write_in_flight_is_fenced_only_when_that_write_has_ended() -> None:
    push = writing_push()
    push.submitted()
    assert push.give_up("why", now=1.0) == (Send(Failed(*KEY, "why", is_fenced=False)),)
    assert not push.may_write
    assert push.written(4, now=2.0) == (Send(Fenced(*KEY)), Release())


def test_a_failed_write_may_still_land_so_the_fence_waits_until_it_has_settled() -> None:
    push = writing_push()
    push.submitted()
    assert push.write_failed("broken", now=1.0) == (Send(Failed(*KEY, "broken", is_fenced=False)),)
    assert push.expire(now=1.9) == ()
    assert push.expire(now=2.0) == (Send(Fenced(*KEY)), Release())


def test_a_revoke_stops_the_push_and_is_answered_when_it_has_stopped() -> None:
    push = writing_push()
    push.submitted()
    assert push.revoke(now=1.0) == ()
    assert not push.may_write
    assert push.written(4, now=2.0) == (Send(Fenced(*KEY)), Release())


def test_a_revoke_after_the_end_is_answered_and_releases_nothing_twice() -> None:
    push = writing_push()
    push.submitted()
    push.written(10, now=1.0)
    assert push.revoke(now=2.0) == (Send(Fenced(*KEY)),)


def test_a_revoke_after_an_unfenced_failure_owes_one_fence() -> None:
    push = writing_push()
    push.submitted()
    push.give_up("why", now=1.0)
    assert push.revoke(now=1.5) == ()
    assert push.written(4, now=2.0) == (Send(Fenced(*KEY)), Release())


@pytest.mark.parametrize("is_granted", [False, True])
def test_the_deadline_fails_a_push_in_any_phase(is_granted: bool) -> None:
    push = writing_push() if is_granted else new_push()
    assert push.expire(now=59.9) == ()
    (failed, release) = push.expire(now=60.0)
    assert isinstance(failed, Send)
    assert "deadline" in getattr(failed.message, "reason", "")
    assert release == Release()


def test_a_write_that_never_ends_is_held_and_then_released_by_force() -> None:
    push = writing_push()
    push.submitted()
    push.give_up("why", now=1.0)
    assert push.expire(now=30.9) == ()
    assert push.expire(now=31.0) == (Release(is_forced=True),)
    assert push.expire(now=99.0) == ()


def test_a_push_released_by_force_is_not_fenced_before_its_write_has_ended() -> None:
    push = writing_push()
    push.submitted()
    push.give_up("why", now=1.0)
    push.expire(now=31.0)
    assert push.revoke(now=40.0) == ()
    assert not push.is_ended
    assert push.written(4, now=50.0) == (Send(Fenced(*KEY)),)
    assert push.is_ended


def test_nothing_is_said_twice_after_the_end() -> None:
    push = new_push()
    push.give_up("first", now=1.0)
    assert push.give_up("second", now=2.0) == ()
    assert push.grant() == ()
    assert not push.may_write
