"""What a plan says where the order of a LeaderWorkerSet's groups holds a rollout up."""

from __future__ import annotations

from fakes.operator_cluster import FakeCluster, make_cluster
from operator_cases.objects import D, both
from pdcluster_operator.core.status.conditions import Reason, Type
from pdcluster_protocol.labels import Role

NODES = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 4), **both("nodesPerInstance", 2)}


def test_that_groups_hold_a_rollout_up_is_told_in_the_look_that_learns_of_the_proof() -> None:
    """No other look need come: nothing moves any more, and our own write of the status is no news."""
    changes = {**NODES, f"{D}.replicas": 2, "spec.rollout": {"maxSurge": 1, "maxUnavailable": 0}}
    world = FakeCluster(has_leader_worker_sets=True)
    world.settle(make_cluster(changes))
    [old] = [seen.name for seen in world.observed().workloads if seen.role is Role.DECODE]
    world.pods[old].ready, world.pods[old].ready_groups = 1, (1,)
    cluster = make_cluster({**changes, "spec.image": "engine:2"})
    world.reconcile(cluster)
    for name, pods in world.pods.items():
        if name != old:
            pods.live = pods.ready = world.replicas(name)
    while not (plan := world.reconcile(cluster)).to_verify:
        assert plan.moves
    world.verify(plan)
    told = world.reconcile(cluster).status.condition(Type.PROGRESSING)
    assert told
    assert told.reason is Reason.HELD_BY_GROUPS
    assert f"group 0 of {old} is not ready" in told.message
