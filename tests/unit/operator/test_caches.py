"""What the watches have shown, whatever the order in which they show it."""

from __future__ import annotations

from typing import Any

from operator_cases.objects import pdcluster
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.seen.object_views import View, view_of
from pdcluster_operator.kinds import LEADER_WORKER_SET
from pdcluster_protocol import labels

KEY = Key("default", "pool")


def cluster(version: int = 1, uid: str = "c1") -> View:
    return view_of(pdcluster({"metadata.uid": uid, "metadata.resourceVersion": str(version)}))


def child(name: str = "x", version: int = 1, uid: str = "u1", owner: str = "c1", **spec: Any) -> View:
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {labels.CLUSTER: "pool"},
        "ownerReferences": [{"uid": owner, "controller": True}],
    }
    return view_of({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})


def test_a_child_is_found_at_its_pdcluster_and_only_its_owners() -> None:
    caches = Caches()
    assert caches.put(child("x")) == KEY
    assert caches.put(child("y", uid="u2", owner="c0")) == KEY
    assert caches.keys() == []
    assert caches.put(cluster()) == KEY
    assert caches.keys() == [KEY]
    assert [one.ref.name for one in caches.picture(KEY, "c1").children] == ["x"]


def test_the_same_again_is_no_news_and_an_older_one_is_not_kept() -> None:
    caches = Caches()
    caches.put(child(version=5, paused=True))
    assert caches.put(child(version=6, paused=True)) is None
    assert caches.put(child(version=3, paused=False)) is None
    found = caches.child(child().ref)
    assert found is not None
    assert found.resource_version == "6"
    assert caches.put(child(version=7, paused=False)) == KEY


def test_what_is_gone_is_forgotten_unless_another_one_has_its_name() -> None:
    caches = Caches()
    caches.put(child(uid="u1"))
    caches.put(child(uid="u2"))
    assert caches.drop(child().ref, "u1") is None
    assert caches.child(child().ref) is not None
    assert caches.drop(child().ref, "u2") == KEY
    assert caches.drop(child().ref, "u2") is None
    assert caches.child(child().ref) is None


def test_a_pdcluster_that_is_gone_leaves_its_children_until_they_go() -> None:
    caches = Caches()
    caches.put(cluster())
    caches.put(child())
    caches.drop(cluster().ref, "c1")
    assert caches.cluster(KEY) is None
    assert caches.keys() == []
    assert len(caches.picture(KEY, "c1").children) == 1
    caches.drop(child().ref, "u1")
    assert caches.picture(KEY, "c1").children == ()


def dead(uid: str, *, owner: str, deaths: int = 1, version: int = 1, name: str = "set-0") -> View:
    ended = {"exitCode": 1, "reason": "Error"}
    container = {"name": "engine", "restartCount": deaths, "state": {}, "lastState": {"terminated": ended}}
    own = {labels.CLUSTER: "pool", labels.ROLE: "decode", labels.REVISION: "r", labels.TEMPLATE: "t"}
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": own,
        "ownerReferences": [{"uid": "o", "kind": owner, "controller": True}],
    }
    status = {"containerStatuses": [container] if deaths else []}
    return view_of({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})


def loops(caches: Caches) -> list[bool]:
    return [pod.is_looping for pod in caches.picture(KEY, "c1").pods]


def test_deaths_of_one_pod_are_counted_from_picture_to_picture() -> None:
    caches = Caches()
    caches.put(cluster())
    for deaths in (1, 2):
        assert caches.put(dead("a", owner="ReplicaSet", deaths=deaths, version=deaths)) == KEY
        assert loops(caches) == [False]
    caches.put(dead("a", owner="ReplicaSet", deaths=3, version=3))
    assert loops(caches) == [True]


def test_a_group_that_dies_in_each_of_its_lives_is_remembered_by_its_name_and_forgotten_with_its_set() -> None:
    caches = Caches()
    caches.put(cluster())
    for uid in ("a", "b", "c"):
        caches.put(dead(uid, owner="StatefulSet"))
        assert loops(caches) == [uid == "c"]
        caches.drop(dead(uid, owner="StatefulSet").ref, uid)
    caches.put(dead("d", owner="StatefulSet", deaths=0))
    assert loops(caches) == [True]
    caches.drop(dead("d", owner="StatefulSet").ref, "d")
    own = {labels.CLUSTER: "pool", labels.ROLE: "decode", labels.REVISION: "r", labels.TEMPLATE: "t"}
    metadata = {"name": "set", "namespace": "default", "uid": "s", "resourceVersion": "1", "labels": own}
    kind = LEADER_WORKER_SET
    leader_worker_set = view_of({"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata})
    caches.put(leader_worker_set)
    caches.drop(leader_worker_set.ref, "s")
    caches.put(dead("e", owner="StatefulSet", deaths=0))
    assert loops(caches) == [False]


def test_names_that_never_come_again_are_not_remembered() -> None:
    caches = Caches()
    caches.put(cluster())
    for uid in ("a", "b", "c"):
        caches.put(dead(uid, owner="ReplicaSet"))
        caches.drop(dead(uid, owner="ReplicaSet").ref, uid)
    caches.put(dead("d", owner="ReplicaSet", deaths=0))
    assert loops(caches) == [False]
