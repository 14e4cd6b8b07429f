"""LeaderWorkerSet: its CRD, and its controller played. Each group gets its pods; numbers are told in status.

A group of which a container was started anew is made anew (``RecreateGroupOnPodRestart``).

Source of truth: sigs.k8s.io/lws v0.7.0. Pods are ``{set}-{group}`` and ``{set}-{group}-{worker}``, and are the set's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from control_plane.crds import PATH, conditions_of
from control_plane.kube_http import MERGE_PATCH, KubeHttp, Object
from integration.harness import eventually
from operator_on_server.node import is_ready, restarts_of
from operator_on_server.rounds import Rounds
from pdcluster_protocol import labels

API: Final = "leaderworkerset.x-k8s.io/v1"
SETS: Final = f"/apis/{API}"
_FILE: Final = Path(__file__).with_name("leaderworkersets.yaml")
_POLL_S: Final = 0.2


def install_groups(admin: KubeHttp) -> None:
    """The API server serves LeaderWorkerSets."""
    crd = yaml.safe_load(_FILE.read_text())
    path = f"{PATH}/{crd['metadata']['name']}"
    admin.apply(path, crd)
    assert eventually(lambda: conditions_of(admin.get(path)).get("Established") == "True")
    assert eventually(lambda: admin.ask("GET", f"{SETS}/leaderworkersets").status == 200)


class PlayedGroups:
    """Of all namespaces. One thread; ``close`` joins it."""

    def __init__(self, admin: KubeHttp) -> None:
        """``install_groups`` was called. It works."""
        self._admin = admin
        self._rounds = Rounds("played groups", self._look, _POLL_S)

    def close(self) -> None:
        """It has stopped. Raises what it died of."""
        self._rounds.close()

    def _look(self) -> None:
        for one in self._admin.get(f"{SETS}/leaderworkersets")["items"]:
            self._settle(one)

    def _settle(self, one: Object) -> None:
        path = f"/api/v1/namespaces/{one['metadata']['namespace']}/pods"
        uid = one["metadata"]["uid"]
        listed = self._admin.get(path)["items"]
        there = {pod["metadata"]["name"]: pod for pod in listed if _owner_uid(pod) == uid}
        wanted = {} if one["metadata"].get("deletionTimestamp") else _pods_of(one)
        for name in wanted.keys() - there.keys():
            self._admin.ask("POST", path, wanted[name])
        for name in (there.keys() - wanted.keys()) | _to_be_made_anew(one, there):
            self._admin.ask("DELETE", f"{path}/{name}")
        ready = sum(is_ready(there[name]) for name in wanted if name in there)
        self._tell(one, ready // one["spec"]["leaderWorkerTemplate"]["size"])

    def _tell(self, one: Object, num_ready: int) -> None:
        status = {"replicas": one["spec"]["replicas"], "readyReplicas": num_ready}
        if one.get("status") != status:
            where = (
                f"{SETS}/namespaces/{one['metadata']['namespace']}/leaderworkersets/{one['metadata']['name']}/status"
            )
            self._admin.ask("PATCH", where, {"status": status}, content_type=MERGE_PATCH)


def _to_be_made_anew(one: Object, there: dict[str, Object]) -> set[str]:
    """Names of all pods of the groups that have lost a container."""
    lost = {_leader_of(one, name) for name, pod in there.items() if restarts_of(pod)}
    return {name for name in there if _leader_of(one, name) in lost}


def _leader_of(one: Object, name: str) -> str:
    own = one["metadata"]["name"]
    return f"{own}-{name.removeprefix(f'{own}-').partition('-')[0]}"


def _pods_of(one: Object) -> dict[str, Object]:
    """By name: every pod of every group."""
    own = one["spec"]["leaderWorkerTemplate"]
    found = {}
    for group in range(one["spec"]["replicas"]):
        leader = f"{one['metadata']['name']}-{group}"
        found[leader] = _pod(one, leader, own.get("leaderTemplate", own["workerTemplate"]), group)
        for worker in range(1, own["size"]):
            found[f"{leader}-{worker}"] = _pod(one, f"{leader}-{worker}", own["workerTemplate"], group)
    return found


def _pod(one: Object, name: str, template: Object, group: int) -> dict[str, Any]:
    owner = {"apiVersion": API, "kind": one["kind"], "name": one["metadata"]["name"], "uid": one["metadata"]["uid"]}
    own = {**template["metadata"].get("labels", {}), labels.GROUP_INDEX: str(group)}
    metadata = {**template["metadata"], "name": name, "labels": own, "ownerReferences": [{**owner, "controller": True}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _owner_uid(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences") or [{"uid": ""}]
    return str(owners[0]["uid"])
