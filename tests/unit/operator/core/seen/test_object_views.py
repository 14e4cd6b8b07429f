"""What is kept of an object, and what of it is news."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.base import API_VERSION
from pdcluster_operator.core.seen.object_views import ChildView, ClusterView, PodView, digest_of, view_of
from pdcluster_protocol import labels

OWN = {labels.CLUSTER: "pool", labels.ROLE: "decode", labels.REVISION: "r", labels.TEMPLATE: "t"}


def pod(**status: Any) -> PodView:
    view = view_of(body("Pod", "v1", spec={}, status={"phase": "Running", **status}))
    assert isinstance(view, PodView)
    return view


def body(kind: str, api_version: str = "apps/v1", metadata: dict[str, Any] | None = None, **rest: Any) -> Any:
    own = {"name": "x", "namespace": "ns", "uid": "u", "resourceVersion": "5", "labels": OWN, **(metadata or {})}
    return {"apiVersion": api_version, "kind": kind, "metadata": own, **rest}


def child(**rest: Any) -> ChildView:
    view = view_of(body("Deployment", **rest))
    assert isinstance(view, ChildView)
    return view


READY = [{"type": "Ready", "status": "True"}]


def test_a_cluster_is_kept_with_its_labels_and_without_the_noise() -> None:
    view = view_of(body("PDCluster", API_VERSION, {"managedFields": [1]}, spec={"a": 1}))
    assert isinstance(view, ClusterView)
    assert (view.uid, view.resource_version, view.cluster, view.labels) == ("u", "5", "x", OWN)
    kept = {"name": "x", "namespace": "ns", "uid": "u", "resourceVersion": "5", "labels": OWN}
    assert view.document == {
        "apiVersion": API_VERSION,
        "kind": "PDCluster",
        "metadata": kept,
        "spec": {"a": 1},
    }


def test_a_pod_is_ready_live_or_going() -> None:
    assert (pod(conditions=READY).is_ready, pod(conditions=READY).is_live) == (True, True)
    assert (pod().is_ready, pod().is_live) == (False, True)
    going = view_of(body("Pod", "v1", {"deletionTimestamp": "2026-01-01T00:00:00Z"}, status={"conditions": READY}))
    assert isinstance(going, PodView)
    assert (going.is_ready, going.is_live, going.is_terminating) == (False, False, True)
    assert pod(phase="Failed").is_live is False
    assert pod().workload == ("decode", "r", "t")


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
            "pod x is not placed: 0/3 nodes are available",
        ),
        (
            {"containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "pod x, container engine: ImagePullBackOff",
        ),
        ({"containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        (
            {
                "initContainerStatuses": [{"name": "fetch", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}],
                "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            "pod x, container fetch: CrashLoopBackOff",
        ),
        ({"conditions": READY, "containerStatuses": [{"name": "e", "state": {"waiting": {"reason": "X"}}}]}, ""),
        (
            {"containerStatuses": [{"name": "e", "restartCount": 2, "lastState": {"terminated": {"exitCode": 3}}}]},
            "pod x, container e died 2 times, the last time Error (exit code 3)",
        ),
    ],
)
def test_a_pod_tells_why_it_is_not_ready(status: dict[str, Any], problem: str) -> None:
    assert pod(**status).problem == problem


def test_a_deployment_tells_its_numbers_and_its_owner() -> None:
    owners = [{"uid": "other"}, {"uid": "pool-uid", "controller": True}]
    failure = [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]
    view = child(
        metadata={"ownerReferences": owners, "creationTimestamp": "1970-01-01T00:01:00Z"},
        spec={"replicas": 3},
        status={"replicas": 2, "readyReplicas": 1, "conditions": failure},
    )
    assert (view.replicas, view.there, view.ready, view.created_s) == (3, 2, 1, 60)
    assert (view.owner_uid, view.problem, view.cluster) == ("pool-uid", "exceeded quota", "pool")
    over = [{**failure[0], "status": "False"}]
    assert child(spec={}, status={"conditions": over}).problem == ""


def test_status_and_an_engines_replicas_are_no_part_of_the_digest() -> None:
    base = child(spec={"replicas": 1, "template": {"a": 1}})
    assert base.digest == child(spec={"replicas": 2, "template": {"a": 1}}, status={"replicas": 1}).digest
    assert base.digest != child(spec={"replicas": 1, "template": {"a": 2}}).digest
    assert base.digest != child(metadata={"labels": {**OWN, "b": "c"}}, spec={"template": {"a": 1}}).digest


def test_the_routers_replicas_are_part_of_the_digest() -> None:
    router = {"metadata": {"labels": {labels.CLUSTER: "pool"}}}
    assert digest_of({**router, "spec": {"replicas": 1}}) != digest_of({**router, "spec": {"replicas": 2}})


def test_a_new_version_alone_is_no_news() -> None:
    before, after = child(spec={}), child(metadata={"resourceVersion": "6"}, spec={})
    assert after.says_the_same(before)
    assert before.is_older_than(after)
    assert not after.is_older_than(before)
    assert not child(metadata={"uid": "v"}, spec={}).is_older_than(after)  # Another object of this name.
    assert not child(spec={"paused": True}).says_the_same(before)
    ninth, tenth = (child(metadata={"resourceVersion": version}, spec={}) for version in ("9", "10"))
    assert ninth.is_older_than(tenth), "versions are numbers, and no text"
    assert not tenth.is_older_than(ninth)
