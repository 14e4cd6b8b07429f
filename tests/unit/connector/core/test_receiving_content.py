"""A receive whose content is compared: done is not enough, the digests must agree."""

from __future__ import annotations

import msgspec

from pdcluster_connector.core.content import DIGEST_MASK
from pdcluster_connector.core.receiving import DigestReceived, Receive, ReceivePhase, Report
from pdcluster_protocol.side_channel import Done
from unit.connector.core.receives import FAILED, FIRST, SECOND, TIMES, A, B, C, D, T, done, lost_of, sender


def compared(digest: int | None) -> Receive:
    """Both ranks may write; the first is done with ``digest``."""
    receive = Receive(T, TIMES, deadline=1000.0, wants_digest=True)
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.open(B, FIRST, sender(1), now=0.0)
    assert receive.done(A, said(0, digest), now=1.0) == ()
    return receive


def said(rank: int, digest: int | None) -> Done:
    return msgspec.structs.replace(done(rank), digest=digest)


def test_it_is_received_when_what_is_here_is_the_sum_of_what_was_pushed() -> None:
    receive = compared(DIGEST_MASK)
    assert receive.done(B, said(1, 5), now=1.0) == (DigestReceived(FIRST),)
    assert receive.phase is ReceivePhase.WAITING
    assert receive.digested(FIRST, 4, now=2.0) == (Report(is_received=True),)


def test_another_digest_loses_the_attempt_with_both_values() -> None:
    receive = compared(1)
    receive.done(B, said(1, 2), now=1.0)
    lost = lost_of(receive.digested(FIRST, 0xABC, now=2.0))
    assert lost.reason == (
        "the content is not what was pushed: its digest is 0000000000000abc on decode, 0000000000000003 on prefill"
    )
    assert receive.phase is ReceivePhase.WAITING, "another attempt may bring it"


def test_a_rank_that_says_no_digest_loses_the_attempt_with_the_cure() -> None:
    receive = compared(1)
    assert "prefill rank 1 sent no digest: run the same" in lost_of(receive.done(B, said(1, None), now=1.0)).reason


def test_a_digest_of_an_attempt_that_is_over_decides_nothing() -> None:
    receive = compared(1)
    receive.done(B, said(1, 2), now=1.0)
    receive.open(C, SECOND, sender(0, "q"), now=2.0)
    assert receive.digested(FIRST, 3, now=3.0) == ()
    receive.open(D, SECOND, sender(1, "q"), now=3.0)
    receive.fail("why", now=4.0)
    assert receive.digested(SECOND, 3, now=5.0) == ()


def test_a_request_that_ends_while_it_is_compared_is_reported_at_once() -> None:
    receive = compared(1)
    receive.done(B, said(1, 2), now=1.0)
    assert receive.fail("why", now=2.0) == (FAILED,)
    assert receive.digested(FIRST, 3, now=3.0) == ()


def test_an_attempt_lost_by_its_digest_stays_lost() -> None:
    receive = compared(1)
    receive.done(B, said(1, 2), now=1.0)
    lost_of(receive.digested(FIRST, 9, now=2.0))
    assert receive.digested(FIRST, 3, now=3.0) == ()
