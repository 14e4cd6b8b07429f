"""One push: what each event makes a prefill rank say, and when its source blocks are free."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.sending import (
    CutLane,
    Push,
    PushKey,
    PushPhase,
    Release,
    Send,
    SendingCommands,
    SumUpPush,
)
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.side_channel import ContentSums, Done, Failed, Fenced, Open, Progress

KEY = PushKey(TransferId("t"), Attempt(1))
LEASE_S = 9.0
CLEAN, UNCLEAN = Send(Fenced(*KEY, is_clean=True)), Send(Fenced(*KEY, is_clean=False))


def new_push() -> Push:
    return Push(KEY, hold_s=30.0, deadline=60.0)


def writing_push(planned: int = 10) -> Push:
    push = new_push()
    push.plan(planned, 2, is_last=True)
    push.grant(LEASE_S, now=0.0)
    return push


def failed_of(commands: SendingCommands) -> Failed:
    (failed,) = (c.message for c in commands if isinstance(c, Send) and isinstance(c.message, Failed))
    return failed


def test_a_push_asks_for_a_grant_first_and_writes_nothing_before_it() -> None:
    push = new_push()
    message = Open(*KEY, BootId("b"), 1000, "token")
    assert push.opening(message) == (Send(message),)
    assert push.is_waiting
    assert not push.may_write
    push.grant(LEASE_S, now=0.0)
    assert push.may_write


def test_done_is_said_once_with_the_acknowledged_bytes_and_the_blocks_are_released() -> None:
    push = writing_push()
    push.submitted()
    push.submitted()
    assert push.written(4) == ()
    assert push.written(6) == (Send(Done(*KEY, 10, 2)), Release())
    assert push.phase is PushPhase.DONE


def test_a_push_is_not_done_before_its_last_part_is_planned() -> None:
    push = new_push()
    push.plan(4, 2, is_last=False)
    push.grant(LEASE_S, now=0.0)
    push.submitted()
    assert push.written(4) == ()
    assert push.plan(0, 2, is_last=True) == (Send(Done(*KEY, 4, 2)), Release())


def test_a_push_without_bytes_is_done_when_granted() -> None:
    push = new_push()
    push.plan(0, 2, is_last=True)
    assert push.grant(LEASE_S, now=0.0) == (Send(Done(*KEY, 0, 2)), Release())


def test_a_push_that_decode_does_not_need_ends_well_without_a_byte_or_a_word() -> None:
    push = new_push()
    push.plan(10, 2, is_last=True)
    assert push.unneeded() == (Release(),)
    assert (push.phase, push.is_unneeded, push.may_write) == (PushPhase.DONE, True, False)
    assert push.grant(LEASE_S, now=1.0) == ()
    assert not push.may_write


def test_a_push_that_writes_already_does_not_believe_that_it_is_unneeded() -> None:
    push = writing_push()
    push.submitted()
    assert push.unneeded() == ()
    assert push.may_write


def test_giving_up_with_nothing_in_flight_is_fenced_at_once() -> None:
    assert new_push().give_up("why", now=1.0) == (Send(Failed(*KEY, "why", is_fenced=True)), Release())


def test_giving_up_with_a_write_in_flight_is_fenced_only_when_that_write_has_ended() -> None:
    push = writing_push()
    push.submitted()
    assert push.give_up("why", now=1.0) == (Send(Failed(*KEY, "why", is_fenced=False)),)
    assert not push.may_write
    assert push.written(4) == (CLEAN, Release())


def test_a_failed_write_asks_for_a_cut_and_holds_the_source_until_it_is_made() -> None:
    push = writing_push()
    push.submitted()
    assert push.write_failed("broken", now=1.0) == (Send(Failed(*KEY, "broken", is_fenced=False)), CutLane("broken"))
    assert push.expire(now=2.0) == ()
    assert push.cut("broken", now=2.0) == (UNCLEAN, Release())
    assert push.phase is PushPhase.STOPPED


def test_a_write_that_ends_well_after_another_has_failed_releases_nothing() -> None:
    push = writing_push()
    push.submitted()
    push.submitted()
    push.write_failed("broken", now=1.0)
    assert push.written(4) == ()
    assert push.cut("broken", now=2.0) == (UNCLEAN, Release())


def test_a_cut_for_another_pushs_sake_fails_a_push_that_writes() -> None:
    push = writing_push()
    push.submitted()
    assert push.cut("other", now=1.0) == (Send(Failed(*KEY, "other", is_fenced=False)), UNCLEAN, Release())


def test_a_cut_between_two_writes_leaves_a_push_clean() -> None:
    push = writing_push()
    push.submitted()
    push.written(4)
    assert push.cut("other", now=1.0) == (Send(Failed(*KEY, "other", is_fenced=True)), Release())


def test_a_cut_or_a_revoke_after_a_clean_end_changes_nothing_and_the_revoke_is_answered() -> None:
    push = writing_push()
    push.submitted()
    push.written(10)
    assert push.cut("other", now=1.0) == ()
    assert push.revoke(now=2.0) == (CLEAN,)


def test_a_write_that_does_not_end_is_held_and_then_cut() -> None:
    push = writing_push()
    push.submitted()
    push.give_up("why", now=1.0)
    assert push.expire(now=30.9) == ()
    assert push.expire(now=31.0) == (CutLane("a write did not end within 30 s"),)
    assert not push.is_ended
    assert push.cut("stuck", now=31.5) == (UNCLEAN, Release())


def test_a_revoke_stops_the_push_and_is_answered_when_it_has_stopped() -> None:
    push = writing_push()
    push.submitted()
    assert push.revoke(now=1.0) == ()
    assert not push.may_write
    assert push.written(4) == (CLEAN, Release())


def test_a_revoke_before_the_grant_is_answered_and_the_late_grant_lets_nothing_out() -> None:
    push = new_push()
    assert push.revoke(now=1.0) == (CLEAN, Release())
    assert push.grant(LEASE_S, now=2.0) == ()
    assert not push.may_write


def test_a_revoke_after_an_unclean_end_is_answered_unclean() -> None:
    push = writing_push()
    push.submitted()
    push.cut("broken", now=1.0)
    assert push.revoke(now=2.0) == (UNCLEAN,)


def test_a_revoke_after_an_unfenced_failure_owes_one_fence() -> None:
    push = writing_push()
    push.submitted()
    push.give_up("why", now=1.0)
    assert push.revoke(now=1.5) == ()
    assert push.written(4) == (CLEAN, Release())


def test_a_writing_push_renews_its_lease_at_every_third_of_it() -> None:
    push = writing_push()
    push.submitted()
    push.written(4)
    assert push.expire(now=2.9) == ()
    assert push.expire(now=3.0) == (Send(Progress(*KEY, 4)),)
    assert push.expire(now=5.9) == ()
    assert push.expire(now=6.0) == (Send(Progress(*KEY, 4)),)


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_push_that_does_not_write_renews_nothing(is_granted: bool) -> None:
    push = writing_push() if is_granted else new_push()
    if is_granted:
        push.submitted()
        push.give_up("why", now=1.0)
    assert push.expire(now=9.0) == ()


@pytest.mark.parametrize("is_granted", [False, True])
def test_the_deadline_fails_a_push_in_any_phase(is_granted: bool) -> None:
    push = writing_push() if is_granted else new_push()
    assert not any(isinstance(c, Send) and isinstance(c.message, Failed) for c in push.expire(now=59.9))
    commands = push.expire(now=60.0)
    assert failed_of(commands).is_fenced
    assert "deadline" in failed_of(commands).reason
    assert commands[-1] == Release()


def test_nothing_is_said_twice_after_the_end() -> None:
    push = new_push()
    push.give_up("first", now=1.0)
    assert push.give_up("second", now=2.0) == ()
    assert push.grant(LEASE_S, now=2.0) == ()
    assert push.expire(now=99.0) == ()
    assert not push.may_write
    assert push.reason == "first"


SUMS = ContentSums(b"12345678", b"87654321")


def compared_push() -> Push:
    push = new_push()
    push.wants_sums = True
    push.plan(10, 2, is_last=True)
    push.grant(LEASE_S, now=0.0)
    push.submitted()
    return push


def done(num_bytes: int, num_pushes: int = 1) -> Send:
    return Send(Done(*KEY, num_bytes, 2, SUMS, num_pushes))


def comparing_push() -> Push:
    push = compared_push()
    push.written(10)
    assert push.summed_up(SUMS) == (done(10),)
    return push


def test_a_push_whose_content_is_compared_keeps_its_blocks_until_decode_has_compared() -> None:
    push = compared_push()
    assert push.written(10) == (SumUpPush(),)
    assert push.may_write, "it still holds its grant, and renews it"
    assert push.expire(now=LEASE_S / 2) == (Send(Progress(*KEY, 10)),)
    assert push.grant(LEASE_S, now=1.0) == (), "the sums are asked for once"
    assert push.summed_up(SUMS) == (done(10),)
    assert (push.phase, push.is_ended) == (PushPhase.COMPARING, False)
    assert push.expire(now=LEASE_S) == (), "no lease runs while decode compares"
    assert push.settled() == (Release(),)
    assert push.phase is PushPhase.DONE
    assert push.settled() == (), "released once"


def test_sums_of_nothing_are_sums() -> None:
    push, nothing = compared_push(), ContentSums(b"", b"")
    push.written(10)
    assert push.summed_up(nothing) == (Send(Done(*KEY, 10, 2, nothing)),)


def test_the_source_is_needed_until_it_was_summed_up_or_the_push_has_stopped() -> None:
    push = compared_push()
    assert push.awaits_sums
    push.written(10)
    assert push.awaits_sums, "all is written, and nothing is summed up yet"
    push.summed_up(ContentSums(b"", b""))
    assert not push.awaits_sums
    stopped = compared_push()
    stopped.give_up("why", now=1.0)
    assert not stopped.awaits_sums


def test_what_decode_wants_again_is_written_under_the_same_grant_and_said_with_the_same_sums() -> None:
    push = comparing_push()
    assert push.again(4, now=20.0) == ()
    assert push.may_write
    assert push.expire(now=20.0 + LEASE_S / 3) == (Send(Progress(*KEY, 10)),)
    push.submitted()
    assert push.written(4) == (done(14, num_pushes=2),)
    assert not push.may_push_again
    assert push.settled() == (Release(),)


def test_a_rank_that_has_none_of_what_decode_wants_again_is_done_at_once() -> None:
    assert comparing_push().again(0, now=1.0) == (done(10, num_pushes=2),)


def test_a_second_push_may_fail_as_the_first() -> None:
    push = comparing_push()
    push.again(4, now=1.0)
    push.submitted()
    assert push.revoke(now=2.0) == ()
    assert push.written(4) == (CLEAN, Release())
    push = comparing_push()
    push.again(4, now=1.0)
    push.submitted()
    failed, cut = push.write_failed("broken", now=2.0)
    assert (failed, cut) == (Send(Failed(*KEY, "broken", is_fenced=False)), CutLane("broken"))


@pytest.mark.parametrize("end", ["give up", "deadline", "cut"])
def test_a_push_whose_lane_ends_while_decode_compares_has_failed_in_nothing(end: str) -> None:
    push = comparing_push()
    ends = {
        "give up": lambda: push.give_up("why", now=1.0),
        "deadline": lambda: push.expire(now=1e9),
        "cut": lambda: push.cut("why", now=1.0),
    }
    assert ends[end]() == (Release(),)
    assert push.phase is PushPhase.DONE
    assert not push.may_push_again


def test_what_cannot_be_pushed_again_is_said_and_let_go() -> None:
    failed = Send(Failed(*KEY, "resharded", is_fenced=True))
    assert comparing_push().refuse_again("resharded") == (failed, Release())


def test_an_attempt_that_is_lost_while_it_is_compared_lets_its_source_go() -> None:
    push = comparing_push()
    assert push.revoke(now=1.0) == (CLEAN, Release())
    assert push.phase is PushPhase.STOPPED


def test_a_push_that_stops_while_it_is_summed_up_says_nothing_of_its_content() -> None:
    push = compared_push()
    push.written(10)
    assert push.revoke(now=1.0) == (CLEAN, Release())
    assert push.summed_up(SUMS) == ()
    assert push.phase is PushPhase.STOPPED
