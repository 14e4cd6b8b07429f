"""What a plan says while the status still has the proof of engines that are gone."""

from __future__ import annotations

from dataclasses import replace

from fakes.operator_cluster import FakeCluster, make_cluster
from operator_cases.objects import both

STOPPED = make_cluster(both("replicas", 0))


def stopped_without_a_word() -> FakeCluster:
    """A proven pool whose engines are gone. The stop's own status was never written."""
    world = FakeCluster()
    world.settle(make_cluster())
    plan, before = world.plan, world.plan_for(STOPPED)
    assert plan
    world.carry_out(replace(before, status=plan.status))
    world.follow()
    assert plan.status.verified
    return world


def test_new_engines_wait_until_the_proof_of_the_old_ones_has_fallen() -> None:
    world = stopped_without_a_word()
    first = world.reconcile(make_cluster())
    assert (first.moves, first.wake_after_s) == ((), 0)
    assert not first.status.verified
    assert world.reconcile(make_cluster()).moves


def test_a_stop_waits_for_no_proof() -> None:
    world = stopped_without_a_word()
    assert world.plan_for(STOPPED).wake_after_s != 0
