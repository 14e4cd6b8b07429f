"""One receive: when an attempt is lost, and what the next one must wait for."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.receiving import AttemptLost, CutSession, ReceivePhase, Report
from pdcluster_connector.core.writers import PeerId, SessionId
from pdcluster_protocol.ids import Attempt
from pdcluster_protocol.side_channel import Failed, Progress
from unit.connector.core.test_receiving import (
    FIRST,
    SECOND,
    A,
    B,
    C,
    D,
    T,
    denial_of,
    done,
    fenced,
    grant,
    granted_receive,
    lost_of,
    new_receive,
    revoke,
    sender,
    without_loss,
)

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
    assert receive.phase is ReceivePhase.WAITING


def test_done_of_an_older_attempt_never_completes_a_newer_one() -> None:
    receive = granted_receive()
    receive.done(A, done(0), now=1.0)
    receive.open(C, SECOND, sender(0, "q"), now=1.0)
    receive.fenced(B, fenced(), now=2.0)
    assert receive.done(C, done(0, SECOND), now=3.0) == ()
    assert receive.done(B, done(1), now=3.0) == ()
    assert receive.phase is ReceivePhase.WAITING


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
    assert receive.phase is ReceivePhase.WAITING
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
    assert receive.expire(now=36.0) == (CutSession(SessionId("session of p")),) * 2


def test_a_rank_that_is_done_needs_no_lease() -> None:
    receive = new_receive()
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.done(A, done(0), now=1.0)
    assert receive.expire(now=900.0) == ()


# Prefill has ended, says the router, and nobody came.


def test_an_attempt_whose_ranks_never_ask_is_lost_when_no_live_one_could_ask_any_more() -> None:
    receive = new_receive()
    assert receive.prefill_ended(FIRST, now=5.0) == ()
    assert receive.expire(now=24.9) == ()
    assert lost_of(receive.expire(now=25.0)).attempt == FIRST
    assert receive.expire(now=26.0) == ()


def test_one_rank_that_never_asks_loses_the_attempt_for_the_others_too() -> None:
    receive = new_receive()
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.prefill_ended(FIRST, now=5.0)
    for now in (8.0, 16.0, 24.0):
        receive.progress(A, Progress(T, FIRST, 1), now=now)
    assert receive.expire(now=24.9) == ()
    assert without_loss(receive.expire(now=25.0)) == [revoke(A)]


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
