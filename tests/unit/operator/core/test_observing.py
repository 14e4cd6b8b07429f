"""What the planner is told of what the caches show."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.core.observing import Known, Picture, observed_of, ready_pods
from pdcluster_operator.core.views import ChildView, PodView, view_of
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

OWN = {labels.CLUSTER: "pool", labels.ROLE: "decode", labels.REVISION: "r", labels.TEMPLATE: "t"}
NOTHING_KNOWN = Known(has_secret=True, has_groups=True, verifications={}, status=None)


def metadata(name: str, more: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "5", "labels": {**OWN, **more}}


def pod(name: str, *, leads: bool, is_ready: bool = True, template: str = "t", revision: str = "r") -> PodView:
    own = {labels.TEMPLATE: template, labels.REVISION: revision}
    more = {**own, labels.LEADER: "true"} if leads else own
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(is_ready)}]}
    view = view_of({"apiVersion": "v1", "kind": "Pod", "metadata": metadata(name, more), "status": status})
    assert isinstance(view, PodView)
    return view


def group_set(replicas: int) -> ChildView:
    api_version = "leaderworkerset.x-k8s.io/v1"
    spec = {"replicas": replicas}
    view = view_of(
        {"apiVersion": api_version, "kind": "LeaderWorkerSet", "metadata": metadata("set", {}), "spec": spec}
    )
    assert isinstance(view, ChildView)
    return view


def test_a_group_on_several_nodes_is_one_instance_and_its_leader_says_how_it_is() -> None:
    pods = (
        pod("a", leads=True),
        pod("a-1", leads=False),
        pod("b", leads=True, is_ready=False),
        pod("b-1", leads=False),
    )
    picture = Picture((group_set(2),), pods)
    [workload] = observed_of(picture, NOTHING_KNOWN).workloads
    assert (workload.live, workload.ready) == (2, 1)
    assert ready_pods(picture, Role.DECODE, "r", "t") == ["a"], "only a leader can be asked"


def test_a_target_is_proven_by_its_own_pods_alone() -> None:
    pods = (pod("old", leads=True, template="s"), pod("older", leads=True, revision="q"), pod("new", leads=True))
    assert ready_pods(Picture((), pods), Role.DECODE, "r", "t") == ["new"]


def test_a_worker_that_is_not_placed_is_a_problem_too() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "no node"}
    told = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata("a-1", {}), "status": {"conditions": [condition]}}
    worker = view_of(told)
    assert isinstance(worker, PodView)
    assert "a-1 is not placed" in observed_of(Picture((), (worker,)), NOTHING_KNOWN).problem
