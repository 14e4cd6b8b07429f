"""Pools that change while clients ask all the time: not one request is lost."""

from __future__ import annotations

from collections.abc import Mapping

from campaign.questions import Answer, Question
from e2e.cluster import eventually
from e2e.load import Load, lost, summary
from e2e.pool import with_engine_arg, with_replicas
from e2e.subject import READY_S, Object, Subject
from pdcluster_protocol.labels import Role

MORE = 40
"""Answers before, between and after: every question of some kind was asked."""
ANSWERS_S = 180.0
GONE_S = 180.0


def test_no_request_is_lost_when_decode_goes_from_one_to_two_and_back(
    pool: Subject, shared: tuple[Subject, Object], expected: Mapping[Question, Answer]
) -> None:
    _, made = shared
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        pool.apply(with_replicas(made, decode=2))
        eventually(lambda: len(pool.pods(Role.DECODE)) == 2, "no second decode engine", READY_S)
        pool.wait_ready()
        load.wait_for(MORE, ANSWERS_S)
        pool.apply(with_replicas(made, decode=1))
        eventually(lambda: len(pool.pods(Role.DECODE)) == 1, "no decode engine goes", GONE_S)
        load.wait_for(MORE, ANSWERS_S)
        pool.wait_ready()
        told = load.stop()
    print(f"\nscale 1 -> 2 -> 1 under load: {summary(told)}")
    assert not lost(told)


def test_no_request_is_lost_while_a_change_of_both_roles_rolls(
    pool: Subject, shared: tuple[Subject, Object], expected: Mapping[Question, Answer]
) -> None:
    """The block size is part of the revision: all engines are new at the end, and none was paired across."""
    _, made = shared
    before = {pod["metadata"]["name"] for role in Role for pod in pool.pods(role)}
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        pool.apply(with_engine_arg(made, "block-size", "64"))
        eventually(lambda: not pool.is_ready(), "the operator sees no change", 60.0)
        pool.wait_ready()
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    after = {pod["metadata"]["name"] for role in Role for pod in pool.pods(role)}
    print(f"\nrollout of block-size under load: {summary(told)}")
    assert not before & after, "an engine of the old revision is left"
    assert not lost(told)
