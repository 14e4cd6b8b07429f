"""One receive: when it is complete, when an attempt is lost, and when its blocks are safe."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.receiving import (
    AttemptLost,
    Command,
    Commands,
    Cut,
    PeerId,
    Phase,
    Receive,
    ReceiveTimes,
    Reply,
    Report,
    Sender,
    SessionId,
)
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.side_channel import Denial, Done, Failed, Fenced, Grant, Progress, Revoke, Unneeded

T = TransferId("t")
FIRST, SECOND = Attempt(1), Attempt(2)
A, B = PeerId(b"a"), PeerId(b"b")
"""Ranks 0 and 1 of the engine that makes the first attempt."""
C, D = PeerId(b"c"), PeerId(b"d")
"""Ranks 0 and 1 of the engine that makes the second."""
OWED = {0: 10, 1: 20}
TIMES = ReceiveTimes(lease_s=9.0, quarantine_s=35.0)
FAILED = Report(is_received=False, reason="why")


def new_receive() -> Receive:
    return Receive(T, TIMES, deadline=1000.0)


def sender(rank: int, engine: str = "p") -> Sender:
    return Sender(BootId(engine), rank, SessionId(f"session of {engine}"), OWED)


def grant(peer: PeerId, attempt: Attempt = FIRST) -> Reply:
    return Reply(peer, Grant(T, attempt, 9000))


def revoke(peer: PeerId, attempt: Attempt = FIRST) -> Reply:
    return Reply(peer, Revoke(T, attempt))


def done(rank: int, attempt: Attempt = FIRST) -> Done:
    return Done(T, attempt, OWED[rank], 2)


def fenced(attempt: Attempt = FIRST, *, is_clean: bool = True) -> Fenced:
    return Fenced(T, attempt, is_clean)


def granted_receive() -> Receive:
    receive = new_receive()
    assert receive.open(A, FIRST, sender(0), now=0.0) == (grant(A),)
    assert receive.open(B, FIRST, sender(1), now=0.0) == (grant(B),)
    return receive


def denial_of(commands: Commands) -> str:
    (reply,) = commands
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Denial)
    return reply.message.reason


def lost_of(commands: Commands) -> AttemptLost:
    (lost,) = (command for command in commands if isinstance(command, AttemptLost))
    return lost


def without_loss(commands: Commands) -> list[Command]:
    return [command for command in commands if not isinstance(command, AttemptLost)]


# Received, and what looks like it.


def test_received_only_when_every_rank_is_done_with_the_expected_bytes() -> None:
    receive = granted_receive()
    assert receive.done(A, done(0), now=1.0) == ()
    assert receive.done(B, done(1), now=2.0) == (Report(is_received=True),)
    assert receive.is_ended


def test_one_rank_is_not_enough_even_if_the_other_never_asked() -> None:
    receive = new_receive()
    receive.open(A, FIRST, sender(0), now=0.0)
    assert receive.done(A, done(0), now=1.0) == ()
    assert receive.phase is Phase.WAITING


def test_done_twice_counts_once() -> None:
    receive = granted_receive()
    receive.done(A, done(0), now=1.0)
    assert receive.done(A, done(0), now=1.0) == ()
    assert receive.phase is Phase.WAITING


def test_done_without_a_grant_is_ignored() -> None:
    assert new_receive().done(A, done(0), now=1.0) == ()


def test_done_with_another_byte_count_loses_the_attempt_and_takes_the_other_grant_back() -> None:
    commands = granted_receive().done(A, Done(T, FIRST, 9, 2), now=1.0)
    assert without_loss(commands) == [revoke(B)]
    assert "wrote 9 bytes, decode expects 10" in lost_of(commands).reason


def test_a_rank_that_opens_after_all_was_received_is_told_that_nothing_is_needed() -> None:
    receive = granted_receive()
    receive.done(A, done(0), now=1.0)
    receive.done(B, done(1), now=1.0)
    assert receive.open(C, SECOND, sender(0, "q"), now=2.0) == (Reply(C, Unneeded(T, SECOND)),)


# Who gets a grant.


def test_an_open_that_comes_twice_is_granted_twice_and_makes_one_writer() -> None:
    receive = granted_receive()
    receive.done(A, done(0), now=1.0)
    assert receive.open(A, FIRST, sender(0), now=1.0) == (grant(A),)
    assert receive.done(B, done(1), now=2.0) == (Report(is_received=True),)


def test_another_prefill_engine_gets_no_grant_for_the_same_attempt() -> None:
    commands = granted_receive().open(C, FIRST, sender(0, "q"), now=1.0)
    assert "another prefill engine" in denial_of(commands)


def test_a_rank_that_owes_nothing_gets_no_grant() -> None:
    assert "rank 2 holds no KV head" in denial_of(new_receive().open(A, FIRST, sender(2), now=1.0))


def test_one_rank_gets_no_second_grant_on_another_connection() -> None:
    assert "on another connection" in denial_of(granted_receive().open(C, FIRST, sender(0), now=1.0))


# Attempts.


def test_a_higher_attempt_is_granted_only_when_every_writer_of_the_lower_one_is_fenced() -> None:
    receive = granted_receive()
    assert receive.open(C, SECOND, sender(0, "q"), now=1.0) == (revoke(A), revoke(B))
    assert receive.open(D, SECOND, sender(1, "q"), now=1.0) == ()
    assert receive.fenced(A, fenced(), now=2.0) == ()
    assert receive.fenced(B, fenced(), now=2.0) == (grant(C, SECOND), grant(D, SECOND))


def test_a_writer_that_finishes_while_it_is_revoked_counts_as_fenced_and_not_as_done() -> None:
    receive = granted_receive()
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    receive.done(A, done(0), now=2.0)
    assert receive.done(B, done(1), now=2.0) == (grant(C, SECOND),)
    assert receive.phase is Phase.WAITING


def test_done_of_an_older_attempt_never_completes_a_newer_one() -> None:
    receive = granted_receive()
    receive.done(A, done(0), now=1.0)
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    receive.fenced(B, fenced(), now=2.0)
    assert receive.done(C, done(0, SECOND), now=3.0) == ()
    assert receive.done(B, done(1), now=3.0) == ()
    assert receive.phase is Phase.WAITING


def test_a_second_attempt_of_the_same_connection_replaces_the_first() -> None:
    receive = granted_receive()
    receive.open(A, SECOND, sender(0), now=1.0)
    receive.open(B, SECOND, sender(1), now=1.0)
    receive.fenced(A, fenced(), now=1.0)
    assert receive.fenced(B, fenced(), now=1.0) == (grant(A, SECOND), grant(B, SECOND))
    assert receive.done(A, done(0), now=2.0) == ()
    receive.done(A, done(0, SECOND), now=2.0)
    assert receive.done(B, done(1, SECOND), now=2.0) == (Report(is_received=True),)


@pytest.mark.parametrize("attempt", [FIRST, SECOND])
def test_an_attempt_that_is_over_gets_no_grant(attempt: Attempt) -> None:
    receive = granted_receive()
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    receive.failed(C, Failed(T, SECOND, "x", is_fenced=True), now=1.0)
    assert "is over on decode" in denial_of(receive.open(PeerId(b"late"), attempt, sender(0, "q"), now=2.0))


def test_an_attempt_is_lost_once() -> None:
    receive = granted_receive()
    first = receive.failed(A, Failed(T, FIRST, "x", is_fenced=True), now=1.0)
    assert lost_of(first) == AttemptLost(FIRST, "prefill gave up: x")
    assert without_loss(first) == [revoke(B)]
    assert receive.failed(B, Failed(T, FIRST, "x", is_fenced=True), now=1.0) == ()


def test_a_lost_attempt_does_not_end_the_request() -> None:
    receive = granted_receive()
    receive.failed(A, Failed(T, FIRST, "x", is_fenced=True), now=1.0)
    receive.fenced(B, fenced(), now=1.0)
    assert receive.phase is Phase.WAITING
    assert receive.open(C, SECOND, sender(0, "q"), now=2.0) == (grant(C, SECOND),)


def test_a_rank_may_give_up_before_it_ever_asked() -> None:
    assert lost_of(new_receive().failed(A, Failed(T, FIRST, "x", is_fenced=True), now=1.0)).attempt == FIRST


def test_a_newer_attempt_that_gives_up_at_once_still_revokes_the_older_one() -> None:
    commands = granted_receive().failed(C, Failed(T, SECOND, "x", is_fenced=True), now=1.0)
    assert without_loss(commands) == [revoke(A), revoke(B)]
    assert lost_of(commands).attempt == SECOND


def test_a_failure_of_an_older_attempt_leaves_the_newer_one_alone() -> None:
    receive = granted_receive()
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    assert receive.failed(A, Failed(T, FIRST, "x", is_fenced=True), now=2.0) == ()
    assert receive.fenced(B, fenced(), now=2.0) == (grant(C, SECOND),)


def test_a_rank_that_gives_up_unfenced_must_still_be_fenced_but_is_not_asked_to() -> None:
    receive = new_receive()
    receive.open(A, FIRST, sender(0), now=0.0)
    assert without_loss(receive.failed(A, Failed(T, FIRST, "x", is_fenced=False), now=1.0)) == []
    assert receive.open(C, SECOND, sender(0, "q"), now=2.0) == ()
    assert receive.fenced(A, fenced(), now=3.0) == (grant(C, SECOND),)


def test_a_writer_that_stops_without_being_asked_loses_the_attempt() -> None:
    assert lost_of(granted_receive().fenced(A, fenced(), now=1.0)).attempt == FIRST


def test_an_attempt_whose_end_is_known_before_its_first_rank_asks_is_granted_all_the_same() -> None:
    receive = new_receive()
    receive.prefill_ended(FIRST, now=0.0)
    assert receive.open(A, FIRST, sender(0), now=1.0) == (grant(A),)
    assert "another prefill engine" in denial_of(receive.open(D, FIRST, sender(1, "q"), now=1.0))


# Leases.


def test_a_rank_that_says_nothing_for_a_lease_loses_the_attempt_for_all() -> None:
    receive = granted_receive()
    assert receive.expire(now=8.9) == ()
    commands = receive.expire(now=9.0)
    assert without_loss(commands) == [revoke(A), revoke(B)]
    assert "prefill rank 0 said nothing for 9 s" in lost_of(commands).reason


def test_progress_renews_the_lease_of_the_rank_that_said_it() -> None:
    receive = granted_receive()
    receive.progress(A, Progress(T, FIRST, 5), now=8.0)
    assert "rank 1 said nothing" in lost_of(receive.expire(now=9.0)).reason


def test_progress_of_every_rank_keeps_the_attempt() -> None:
    receive = granted_receive()
    for peer in (A, B):
        receive.progress(peer, Progress(T, FIRST, 5), now=8.0)
    assert receive.expire(now=16.9) == ()


def test_progress_does_not_prolong_the_quarantine_of_a_revoked_rank() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    receive.progress(A, Progress(T, FIRST, 5), now=20.0)
    assert receive.expire(now=36.0) == (Cut(SessionId("session of p")),) * 2


def test_a_rank_that_is_done_needs_no_lease() -> None:
    receive = new_receive()
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.done(A, done(0), now=1.0)
    assert receive.expire(now=900.0) == ()


# The end without KV.


def test_a_failure_is_reported_only_after_every_writer_is_fenced() -> None:
    receive = granted_receive()
    assert receive.fail("why", now=1.0) == (revoke(A), revoke(B))
    assert receive.fenced(A, fenced(), now=2.0) == ()
    assert receive.fenced(B, fenced(), now=2.0) == (FAILED,)


def test_a_failure_without_writers_is_reported_at_once() -> None:
    assert new_receive().fail("why", now=1.0) == (FAILED,)


def test_those_who_wait_for_their_grant_do_not_get_it_after_the_end() -> None:
    receive = granted_receive()
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    receive.fail("why", now=1.0)
    receive.fenced(A, fenced(), now=2.0)
    assert receive.fenced(B, fenced(), now=2.0) == (FAILED,)


def test_a_rank_that_finishes_while_the_others_are_revoked_needs_no_fence() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    receive.fenced(A, fenced(), now=2.0)
    assert receive.done(B, done(1), now=2.0) == (FAILED,)


def test_the_deadline_fails_the_receive() -> None:
    receive = new_receive()
    assert receive.expire(now=999.9) == ()
    assert receive.expire(now=1000.0) == (Report(is_received=False, reason="deadline passed before the KV was here"),)


def test_the_report_comes_once() -> None:
    receive = new_receive()
    receive.fail("why", now=1.0)
    assert receive.fail("again", now=2.0) == ()
    assert receive.expire(now=9999.0) == ()
    assert "ended on decode" in denial_of(receive.open(A, FIRST, sender(0), now=3.0))


# Cuts.


def test_an_unclean_writer_is_cut_at_once_and_is_fenced_only_by_that() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    receive.fenced(B, fenced(), now=1.0)
    assert receive.fenced(A, fenced(is_clean=False), now=2.0) == (Cut(SessionId("session of p")),)
    assert receive.phase is Phase.STOPPING
    assert receive.cut(SessionId("session of p"), now=3.0) == (FAILED,)


def test_a_writer_that_does_not_answer_is_cut_when_its_quarantine_ends() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    receive.fenced(B, fenced(), now=1.0)
    assert receive.expire(now=35.9) == ()
    assert receive.expire(now=36.0) == (Cut(SessionId("session of p")),)
    assert receive.expire(now=99.0) == ()
    assert receive.cut(SessionId("session of p"), now=99.0) == (FAILED,)


def test_a_cut_session_frees_the_way_for_the_next_attempt() -> None:
    receive = granted_receive()
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    receive.expire(now=36.0)
    assert receive.cut(SessionId("session of p"), now=37.0) == (grant(C, SECOND),)


def test_a_cut_of_another_session_frees_nobody() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    assert receive.cut(SessionId("session of q"), now=2.0) == ()
    assert receive.phase is Phase.STOPPING


def test_a_cut_for_another_requests_sake_loses_the_attempt() -> None:
    receive = granted_receive()
    lost = lost_of(receive.cut(SessionId("session of p"), now=1.0))
    assert (lost.attempt, lost.reason) == (FIRST, "the session of its prefill engine was cut")


def test_a_cut_takes_those_who_wait_for_their_grant_on_that_session_along() -> None:
    receive = granted_receive()
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    assert lost_of(receive.cut(SessionId("session of q"), now=2.0)).attempt == SECOND
    receive.fenced(A, fenced(), now=3.0)
    assert receive.fenced(B, fenced(), now=3.0) == ()


# Prefill has ended, says the router, and nobody came.


def test_an_attempt_whose_ranks_never_ask_is_lost_a_lease_after_prefill_has_ended() -> None:
    receive = new_receive()
    assert receive.prefill_ended(FIRST, now=5.0) == ()
    assert receive.expire(now=13.9) == ()
    assert lost_of(receive.expire(now=14.0)).attempt == FIRST
    assert receive.expire(now=15.0) == ()


def test_one_rank_that_never_asks_loses_the_attempt_for_the_others_too() -> None:
    receive = new_receive()
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.prefill_ended(FIRST, now=5.0)
    receive.progress(A, Progress(T, FIRST, 1), now=13.0)
    assert without_loss(receive.expire(now=14.0)) == [revoke(A)]


def test_ranks_that_have_all_asked_may_take_their_time_after_prefill_has_ended() -> None:
    receive = granted_receive()
    receive.prefill_ended(FIRST, now=5.0)
    for peer in (A, B):
        receive.progress(peer, Progress(T, FIRST, 1), now=13.0)
    assert receive.expire(now=20.0) == ()


def test_the_end_of_an_attempt_that_is_over_is_no_news() -> None:
    receive = granted_receive()
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    receive.prefill_ended(FIRST, now=2.0)
    receive.fenced(A, fenced(), now=3.0)
    receive.fenced(B, fenced(), now=3.0)
    receive.progress(C, Progress(T, SECOND, 1), now=11.0)
    assert receive.expire(now=12.0) == ()


def test_the_end_of_a_newer_attempt_stops_the_writers_of_the_older_one() -> None:
    receive = granted_receive()
    assert receive.prefill_ended(SECOND, now=2.0) == (revoke(A), revoke(B))
