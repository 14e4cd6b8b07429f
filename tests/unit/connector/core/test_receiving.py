"""One receive: when it is complete, when it fails, and when its blocks are safe."""

from __future__ import annotations

from pdcluster_connector.core.receiving import Command, PeerId, Phase, Receive, Reply, Report, Sender
from pdcluster_connector.core.sending import PushKey
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.side_channel import Denial, Done, Failed, Fenced, Grant, Revoke

KEY = PushKey(TransferId("t"), Attempt(1))
A, B = PeerId(b"a"), PeerId(b"b")
OWED = {0: 10, 1: 20}


def new_receive() -> Receive:
    return Receive(KEY, deadline=60.0, quarantine_s=35.0)


def sender(rank: int, boot: str = "p") -> Sender:
    return Sender(BootId(boot), rank, OWED)


def granted_receive() -> Receive:
    receive = new_receive()
    assert receive.open(A, sender(0)) == (Reply(A, Grant(*KEY)),)
    assert receive.open(B, sender(1)) == (Reply(B, Grant(*KEY)),)
    return receive


def denial_of(commands: tuple[Command, ...]) -> str:
    (reply,) = commands
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Denial)
    return reply.message.reason


def test_received_only_when_every_rank_is_done_with_the_expected_bytes() -> None:
    receive = granted_receive()
    assert receive.done(A, Done(*KEY, 10, 2), now=1.0) == ()
    assert receive.done(B, Done(*KEY, 20, 2), now=2.0) == (Report(is_received=True),)
    assert receive.received_bytes == 30


def test_one_rank_is_not_enough_even_if_the_other_never_asked() -> None:
    receive = new_receive()
    receive.open(A, sender(0))
    assert receive.done(A, Done(*KEY, 10, 2), now=1.0) == ()
    assert receive.phase is Phase.WAITING


def test_done_twice_counts_once() -> None:
    receive = granted_receive()
    receive.done(A, Done(*KEY, 10, 2), now=1.0)
    assert receive.done(A, Done(*KEY, 10, 2), now=1.0) == ()
    assert receive.phase is Phase.WAITING


def test_done_with_too_few_bytes_fails_and_takes_the_other_grant_back() -> None:
    receive = granted_receive()
    assert receive.done(A, Done(*KEY, 9, 2), now=1.0) == (Reply(B, Revoke(*KEY)),)
    (report,) = receive.fenced(B, Fenced(*KEY))
    assert isinstance(report, Report)
    assert not report.is_received
    assert "wrote 9 bytes, decode expects 10" in report.reason


def test_done_without_a_grant_is_ignored() -> None:
    receive = new_receive()
    assert receive.done(A, Done(*KEY, 10, 2), now=1.0) == ()


def test_another_prefill_engine_gets_no_grant_for_the_same_attempt() -> None:
    assert "another prefill engine" in denial_of(granted_receive().open(PeerId(b"c"), sender(0, boot="q")))


def test_a_rank_that_owes_nothing_gets_no_grant() -> None:
    assert "rank 2 holds no KV head" in denial_of(new_receive().open(A, sender(2)))


def test_one_rank_gets_no_second_grant_on_another_connection() -> None:
    assert "on another connection" in denial_of(granted_receive().open(PeerId(b"c"), sender(0)))


def test_a_failure_is_reported_only_after_every_writer_is_fenced() -> None:
    receive = granted_receive()
    assert receive.fail("why", now=1.0) == (Reply(A, Revoke(*KEY)), Reply(B, Revoke(*KEY)))
    assert receive.fenced(A, Fenced(*KEY)) == ()
    assert receive.fenced(B, Fenced(*KEY)) == (Report(is_received=False, reason="why"),)


def test_a_failure_without_writers_is_reported_at_once() -> None:
    assert new_receive().fail("why", now=1.0) == (Report(is_received=False, reason="why"),)


def test_a_writer_that_never_answers_is_waited_for_until_the_quarantine_ends() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    assert receive.expire(now=35.9) == ()
    (report,) = receive.expire(now=36.0)
    assert isinstance(report, Report)
    assert not report.is_received
    assert "quarantined" in report.reason


def test_a_rank_that_gives_up_unfenced_must_still_be_fenced() -> None:
    receive = new_receive()
    receive.open(A, sender(0))
    assert receive.failed(A, Failed(*KEY, "x", is_fenced=False), now=1.0) == (Reply(A, Revoke(*KEY)),)
    assert receive.fenced(A, Fenced(*KEY)) == (Report(is_received=False, reason="prefill gave up: x"),)


def test_a_rank_that_gives_up_fenced_ends_it_at_once() -> None:
    receive = new_receive()
    receive.open(A, sender(0))
    assert receive.failed(A, Failed(*KEY, "x", is_fenced=True), now=1.0) == (
        Report(is_received=False, reason="prefill gave up: x"),
    )


def test_the_deadline_fails_the_receive() -> None:
    receive = new_receive()
    assert receive.expire(now=59.9) == ()
    assert receive.expire(now=60.0) == (Report(is_received=False, reason="deadline passed before the KV was here"),)


def test_a_rank_that_finishes_while_the_others_are_revoked_needs_no_fence() -> None:
    receive = granted_receive()
    receive.fail("why", now=1.0)
    receive.fenced(A, Fenced(*KEY))
    assert receive.done(B, Done(*KEY, 20, 2), now=2.0) == (Report(is_received=False, reason="why"),)


def test_the_report_comes_once() -> None:
    receive = new_receive()
    receive.fail("why", now=1.0)
    assert receive.fail("again", now=2.0) == ()
    assert receive.expire(now=99.0) == ()
    assert "ended on decode" in denial_of(receive.open(A, sender(0)))
