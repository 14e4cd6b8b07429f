"""A pool that changes while clients ask all the time: not one request is lost."""

from __future__ import annotations

from collections.abc import Mapping

from campaign.questions import Answer, Question
from e2e.cluster import eventually
from e2e.leaving import Leaving, hasty, late, spans
from e2e.load import Load, crowd, lost, summary
from e2e.subject import READY_S, SharedPool, name_of
from pdcluster_protocol.labels import Role

MORE = 40
"""Answers before, between and after: every question of some kind was asked."""
FEW = 16
"""Long ones: two for each of a crowd."""
ANSWERS_S = 180.0
GONE_S = 180.0
NOTICE_S = 60.0


def test_no_request_is_lost_when_decode_goes_from_one_to_two_and_back(
    shared: SharedPool, expected: Mapping[Question, Answer]
) -> None:
    """Answers are long and asked for without a rest until the pod is gone: an engine goes soon only when routers leave
    it alone, and has nothing left to do then."""
    shared.take_on()
    pool = shared.subject
    with crowd(pool.place(), pool.expect_long(expected)) as load:
        load.wait_for(FEW, ANSWERS_S)
        shared.take_on(decode=2)
        assert len(pool.pods(Role.DECODE)) == 2
        load.wait_for(FEW, ANSWERS_S)
        with Leaving(pool) as leaving:
            shared.ask_for(decode=1)
            left = leaving.wait_gone(1, GONE_S)
        load.wait_for(FEW, ANSWERS_S)
        told = load.stop()
    print(f"\nscale 1 -> 2 -> 1 under load: {summary(told)}; {spans(left)}")
    assert not lost(told)
    assert not late(left)
    assert not hasty(left)
    pool.wait_ready()


def test_no_request_is_lost_while_a_change_of_both_roles_rolls(
    shared: SharedPool, expected: Mapping[Question, Answer]
) -> None:
    """The block size is part of the revision: all engines are new at the end."""
    shared.take_on()
    pool = shared.subject
    before = {name_of(pod) for role in Role for pod in pool.pods(role)}
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        shared.change("block-size", "64", *Role)
        eventually(lambda: not pool.is_ready(), "the operator sees no change", NOTICE_S)
        pool.wait_ready(READY_S)
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    after = {name_of(pod) for role in Role for pod in pool.pods(role)}
    print(f"\nrollout of block-size under load: {summary(told)}")
    assert not before & after, "an engine of the old revision is left"
    assert not lost(told)
