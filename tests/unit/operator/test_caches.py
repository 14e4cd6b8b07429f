"""What the watches have shown, whatever the order in which they show it."""

from __future__ import annotations

from typing import Any

from operator_cases.objects import pdcluster
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.views import View, view_of
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
