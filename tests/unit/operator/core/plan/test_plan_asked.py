"""What the API server is asked before anything is done, so that a spec which it refuses changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.operator_cluster import FakeCluster, make_cluster
from operator_cases.objects import D, P
from pdcluster_operator.core.plan.actions import Plan, Way

NO_SURGE = {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 1}}
ROUTERS = {("Service", "pool-router", Way.APPLY), ("Deployment", "pool-router", Way.APPLY)}


def asked(plan: Plan) -> set[tuple[str, str, Way]]:
    return {(child.kind, child.name, child.way) for child in plan.asked}


def running(changes: dict[str, Any]) -> FakeCluster:
    world = FakeCluster()
    world.settle(make_cluster(changes))
    return world


def test_of_a_new_pool_all_that_the_user_has_a_say_in_is_asked() -> None:
    plan = FakeCluster().plan_for(make_cluster())
    made = {(child.kind, child.name, child.way) for child in plan.children}
    assert asked(plan) == {one for one in made if one[0] == "Deployment"} | ROUTERS
    assert len(asked(plan)) == 4


def test_of_workloads_that_are_there_none_is_asked() -> None:
    assert asked(running({}).plan_for(make_cluster())) == ROUTERS


@pytest.mark.parametrize("part", [P, D])
def test_without_a_surge_the_new_workload_is_asked_before_the_old_one_loses_an_engine(part: str) -> None:
    changes = {**NO_SURGE, f"{part}.podOverrides": {"metadata": {"annotations": {"a": "b"}}}}
    plan = running(NO_SURGE).plan_for(make_cluster(changes))
    [new] = [child for child in plan.asked if child.way is Way.CREATE]
    assert new.document["spec"]["template"]["metadata"]["annotations"] == {"a": "b"}
    assert new.name not in {child.name for child in plan.children}, "its turn comes later"
    assert [move.change.after for move in plan.moves] == [0]


def test_what_is_asked_is_the_same_whatever_number_it_will_start_with() -> None:
    """So that it is asked once."""
    few, many = (FakeCluster().plan_for(make_cluster({f"{D}.replicas": number})) for number in (1, 7))
    assert [child.document for child in few.asked] == [child.document for child in many.asked]
