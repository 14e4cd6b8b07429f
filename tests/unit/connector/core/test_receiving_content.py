"""One receive whose content is compared: what differs is pushed again, once."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from pdcluster_connector.core.content import Found, plan_content
from pdcluster_connector.core.receiving import (
    AttemptLost,
    Mismatched,
    Receive,
    ReceivePhase,
    ReceiveTimes,
    ReceivingCommands,
    Reply,
    Report,
    SumUpReceive,
)
from pdcluster_connector.core.writers import Debt, PeerId, Sender, SessionId
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.side_channel import (
    Again,
    ContentSums,
    Done,
    Failed,
    RankLayout,
    RegionLayout,
    Revoke,
    Settled,
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


def debt(rank: int) -> Debt:
    return Debt(OWED.get(rank, 0), Fraction(1, 2), Fraction(1), frozenset(OWED))


def sender(rank: int, engine: str = "p") -> Sender:
    return Sender(BootId(engine), rank, SessionId(f"session of {engine}"), debt(rank))


def revoke(peer: PeerId, attempt: Attempt = FIRST) -> Reply:
    return Reply(peer, Revoke(T, attempt))


def done(rank: int, attempt: Attempt = FIRST) -> Done:
    return Done(T, attempt, OWED[rank], 2)


def lost_of(commands: ReceivingCommands) -> AttemptLost:
    (lost,) = (command for command in commands if isinstance(command, AttemptLost))
    return lost


REGIONS = tuple(RegionLayout(f"layers.{n}", 0, n << 20, 9, 64, 64, heads=2, page_tokens=256) for n in range(2))
PLAN = plan_content(ContentCheck.FULL, RankLayout(0, 1, REGIONS), (((0, 512),),), "t")
WRONG = {2: 1}
"""Of the second layer the first head."""


def sums(rows: Mapping[int, int], ranges: Mapping[int, int]) -> ContentSums:
    lists = [np.zeros(PLAN.num_rows, "<u8"), np.zeros(len(PLAN.numbers), "<u8")]
    for of_list, said in zip(lists, (rows, ranges), strict=True):
        for place, number in said.items():
            of_list[place] = number
    return ContentSums(*(of_list.tobytes() for of_list in lists))


def found(rows: Mapping[int, int], ranges: Mapping[int, int]) -> Found:
    return Found(PLAN, sums(rows, ranges))


HALF, MOST = sums({0: 5}, {1: 5}), sums({0: (1 << 64) - 1, 1: 1}, {1: (1 << 64) - 1, 0: 1})
RIGHT = found({0: 4, 1: 1}, {1: 4, 0: 1})
BAD = found({0: 4, 1: 1, 2: 9}, {1: 4, 0: 10})
AGAIN = Again(T, FIRST, (1,), ((0, 256),))
SETTLED = (Reply(A, Settled(T, FIRST)), Reply(B, Settled(T, FIRST)))


def said(rank: int, content: ContentSums | None, num_pushes: int = 1) -> Done:
    return msgspec.structs.replace(done(rank), sums=content, num_pushes=num_pushes)


def comparing() -> Receive:
    """Both ranks are done, and what is here is summed up."""
    receive = Receive(T, TIMES, deadline=1000.0, wants_sums=True)
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.open(B, FIRST, sender(1), now=0.0)
    assert receive.done(A, said(0, HALF), now=1.0) == ()
    assert receive.done(B, said(1, MOST), now=1.0) == (SumUpReceive(FIRST, has_draft=False),)
    return receive


def pushing_again() -> Receive:
    receive = comparing()
    mismatched, *asked = receive.summed_up(FIRST, BAD, now=2.0)
    assert isinstance(mismatched, Mismatched)
    assert asked == [Reply(A, AGAIN), Reply(B, AGAIN)]
    return receive


def test_it_is_received_when_what_is_here_is_the_sum_of_what_was_pushed_and_nobody_keeps_its_source() -> None:
    receive = comparing()
    assert receive.phase is ReceivePhase.WAITING
    assert receive.summed_up(FIRST, RIGHT, now=2.0) == (Report(is_received=True), *SETTLED)


def test_what_differs_is_named_and_pushed_again() -> None:
    receive = comparing()
    mismatched = receive.summed_up(FIRST, BAD, now=2.0)[0]
    assert mismatched == Mismatched(
        FIRST, "the content is not what was pushed: layer layers.1, KV heads 0, tokens 0 to 255 of 1 ranges"
    )
    assert receive.awaited() == {A, B}, "both may write again"


@pytest.mark.parametrize(("rows", "ranges"), [({0: 4, 1: 2}, {1: 4, 0: 1}), ({0: 4, 1: 1}, {1: 4, 0: 2})])
def test_either_kind_of_sums_is_enough_to_differ(rows: dict[int, int], ranges: dict[int, int]) -> None:
    """In the other one several faults may outweigh each other, by chance."""
    mismatched, *asked = comparing().summed_up(FIRST, found(rows, ranges), now=2.0)
    assert isinstance(mismatched, Mismatched)
    assert [type(reply.message) for reply in asked if isinstance(reply, Reply)] == [Again, Again]


def test_a_second_push_that_brings_what_was_pushed_is_received() -> None:
    receive = pushing_again()
    assert receive.done(A, said(0, HALF), now=3.0) == (), "said before it was asked again, and late"
    assert receive.done(A, msgspec.structs.replace(said(0, HALF, 2), num_bytes=1), now=3.0) == ()
    assert receive.done(B, said(1, MOST, 2), now=3.0) == (SumUpReceive(FIRST, has_draft=False),)
    assert receive.summed_up(FIRST, RIGHT, now=4.0) == (Report(is_received=True), *SETTLED)


def test_what_a_rank_said_before_it_was_asked_again_does_not_count_for_its_second_push() -> None:
    receive = pushing_again()
    assert receive.done(A, said(0, HALF), now=3.0) == ()
    assert receive.done(B, said(1, MOST, 2), now=3.0) == (), "the other rank still writes"
    assert A in receive.awaited()


def test_what_differs_twice_loses_the_attempt_and_is_never_received() -> None:
    receive = pushing_again()
    receive.done(A, said(0, HALF, 2), now=3.0)
    receive.done(B, said(1, MOST, 2), now=3.0)
    mismatched, *rest = receive.summed_up(FIRST, BAD, now=4.0)
    assert isinstance(mismatched, Mismatched)
    assert [command for command in rest if isinstance(command, Reply)] == list(SETTLED)
    assert lost_of(tuple(rest)).reason.endswith(", pushed twice")
    assert receive.summed_up(FIRST, RIGHT, now=5.0) == (), "an attempt lost by its content stays lost"
    assert receive.phase is ReceivePhase.WAITING, "another attempt may bring it"


def test_a_request_that_shall_prove_something_is_lost_by_the_first_difference() -> None:
    receive = Receive(T, TIMES, deadline=1000.0, wants_sums=True, may_push_again=False)
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.open(B, FIRST, sender(1), now=0.0)
    receive.done(A, said(0, HALF), now=1.0)
    receive.done(B, said(1, MOST), now=1.0)
    commands = receive.summed_up(FIRST, BAD, now=2.0)
    assert lost_of(commands).reason.endswith("of 1 ranges")
    assert not [c for c in commands if isinstance(c, Reply) and isinstance(c.message, Again)]


def test_a_second_push_has_a_lease_and_a_fence_as_the_first() -> None:
    receive = pushing_again()
    assert receive.expire(now=1.9 + TIMES.lease_s) == (), "it begins anew"
    assert "said nothing for" in lost_of(receive.expire(now=2.0 + TIMES.lease_s)).reason
    assert receive.open(C, SECOND, sender(0, "q"), now=30.0) == (), "no grant while a writer may still write"
    receive = pushing_again()
    lost = receive.failed(A, Failed(T, FIRST, "it has let go", is_fenced=True), now=3.0)
    assert lost_of(lost).reason == "prefill gave up: it has let go"
    assert revoke(B) in lost


def test_what_a_rank_said_before_it_was_asked_again_fences_no_second_push() -> None:
    """It may have been sent before ``Again`` came, and the second push is under way by now."""
    receive = pushing_again()
    assert revoke(A, FIRST) in receive.fail("why", now=3.0)
    assert receive.done(A, said(0, HALF), now=4.0) == ()
    assert receive.done(B, said(1, MOST, 2), now=4.0) == (), "rank 0 may still write"
    assert receive.awaited() == {A}
    assert receive.done(A, said(0, HALF, 2), now=5.0) == (FAILED,)


def test_a_rank_that_says_no_sums_loses_the_attempt_with_the_cure() -> None:
    receive = Receive(T, TIMES, deadline=1000.0, wants_sums=True)
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.open(B, FIRST, sender(1), now=0.0)
    receive.done(A, said(0, HALF), now=1.0)
    lost = receive.done(B, said(1, None), now=1.0)
    assert "prefill rank 1 sent no sums: run the same" in lost_of(lost).reason
    assert SETTLED[0] in lost, "the other one keeps its source for nothing"


def test_sums_that_are_counted_otherwise_lose_the_attempt() -> None:
    receive = Receive(T, TIMES, deadline=1000.0, wants_sums=True)
    receive.open(A, FIRST, sender(0), now=0.0)
    receive.open(B, FIRST, sender(1), now=0.0)
    receive.done(A, said(0, ContentSums(b"12345678", b"")), now=1.0)
    receive.done(B, said(1, MOST), now=1.0)
    assert "prefill has 1 sums of content, decode has 4" in lost_of(receive.summed_up(FIRST, RIGHT, now=2.0)).reason


def test_sums_of_an_attempt_that_is_over_decide_nothing_and_its_ranks_let_go() -> None:
    receive = comparing()
    assert receive.open(C, SECOND, sender(0, "q"), now=2.0)[:2] == SETTLED
    assert receive.summed_up(FIRST, RIGHT, now=3.0) == ()
    receive.open(D, SECOND, sender(1, "q"), now=3.0)
    receive.fail("why", now=4.0)
    assert receive.summed_up(SECOND, RIGHT, now=5.0) == ()
    late = said(0, HALF)
    assert receive.done(A, late, now=6.0) == (Reply(A, Settled(T, FIRST)),), "it would wait to be told"


def test_a_request_that_ends_while_it_is_compared_is_reported_at_once() -> None:
    receive = comparing()
    assert receive.fail("why", now=2.0) == (*SETTLED, FAILED)
    assert receive.summed_up(FIRST, RIGHT, now=3.0) == ()
