"""One receive: when it is complete, who may write, and when its blocks are safe."""

from __future__ import annotations

from fractions import Fraction

from pdcluster_connector.core.receiving import (
    AttemptLost,
    CutSession,
    Receive,
    ReceivePhase,
    ReceiveTimes,
    ReceivingCommand,
    ReceivingCommands,
    Reply,
    Report,
)
from pdcluster_connector.core.writers import Debt, PeerId, Sender, SessionId
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.side_channel import (
    Denial,
    Done,
    Fenced,
    Grant,
    Revoke,
    Unneeded,
)

T = TransferId("t")
FIRST, SECOND = Attempt(1), Attempt(2)
A, B = PeerId(b"a"), PeerId(b"b")
"""Ranks 0 and 1 of the engine that makes the first attempt."""
C, D = PeerId(b"c"), PeerId(b"d")
"""Ranks 0 and 1 of the engine that makes the second."""
OWED = {0: 10, 1: 20}
"""Bytes of the two ranks."""
TIMES = ReceiveTimes(lease_s=9.0, quarantine_s=35.0, ask_s=20.0)
FAILED = Report(is_received=False, reason="why")


def new_receive() -> Receive:
    return Receive(T, TIMES, deadline=1000.0)


def debt(rank: int) -> Debt:
    return Debt(OWED.get(rank, 0), Fraction(1, 2), Fraction(1), frozenset(OWED))


def sender(rank: int, engine: str = "p") -> Sender:
    return Sender(BootId(engine), rank, SessionId(f"session of {engine}"), debt(rank))


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


def denial_of(commands: ReceivingCommands) -> str:
    (reply,) = commands
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Denial)
    assert reply.message.transfer_id == T
    assert reply.message.attempt
    return reply.message.reason


def lost_of(commands: ReceivingCommands) -> AttemptLost:
    (lost,) = (command for command in commands if isinstance(command, AttemptLost))
    return lost


def without_loss(commands: ReceivingCommands) -> list[ReceivingCommand]:
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
    assert receive.phase is ReceivePhase.WAITING


def test_done_twice_counts_once() -> None:
    receive = granted_receive()
    receive.done(A, done(0), now=1.0)
    assert receive.done(A, done(0), now=1.0) == ()
    assert receive.phase is ReceivePhase.WAITING


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
    assert "rank 2 holds no KV of this decode rank" in denial_of(new_receive().open(A, FIRST, sender(2), now=1.0))


def test_one_rank_gets_no_second_grant_on_another_connection() -> None:
    assert "on another connection" in denial_of(granted_receive().open(C, FIRST, sender(0), now=1.0))


# The end without KV.


def test_a_failure_is_reported_only_after_every_writer_is_fenced() -> None:
    receive = granted_receive()
    assert receive.fail("why", now=1.0) == (revoke(A), revoke(B))
    assert receive.fenced(A, fenced(), now=2.0) == ()
    assert receive.fenced(B, fenced(), now=2.0) == (FAILED,)


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


def test_a_failure_without_writers_is_reported_at_once_and_once() -> None:
    receive = new_receive()
    assert receive.fail("why", now=1.0) == (FAILED,)
    assert receive.fail("again", now=2.0) == ()
    assert receive.expire(now=9999.0) == ()
    assert "ended on decode" in denial_of(receive.open(A, FIRST, sender(0), now=3.0))


# Cuts.


def test_an_unclean_writer_is_cut_at_once_and_is_fenced_only_by_that() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    receive.fenced(B, fenced(), now=1.0)
    assert receive.fenced(A, fenced(is_clean=False), now=2.0) == (CutSession(SessionId("session of p")),)
    assert receive.phase is ReceivePhase.STOPPING
    assert receive.cut(SessionId("session of p"), now=3.0) == (FAILED,)


def test_a_writer_that_does_not_answer_is_cut_when_its_quarantine_ends() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    receive.fenced(B, fenced(), now=1.0)
    assert receive.expire(now=35.9) == ()
    assert receive.expire(now=36.0) == (CutSession(SessionId("session of p")),)
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
    assert receive.phase is ReceivePhase.STOPPING


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


# Who must not be forgotten.


def test_who_asks_while_others_may_still_write_is_awaited_as_they_are() -> None:
    receive = granted_receive()
    assert receive.awaited() == {A, B}
    assert without_loss(receive.open(C, SECOND, sender(0, "q"), now=1.0)) == [revoke(A), revoke(B)]
    assert receive.awaited() == {A, B, C}
