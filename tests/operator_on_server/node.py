"""Plays one node and its scheduler: pods are placed, get ready, and go when they were told to.

As the kubelet it is level-triggered: it lists pods again and again, so it survives whatever happens to the API server.
What it says of a pod is what a kubelet says, as far as controllers and the operator read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from control_plane.kube_http import MERGE_PATCH, KubeHttp, Object
from operator_on_server.rounds import Rounds

NODE: Final = "node"
_POLL_S: Final = 0.1
_BEAT_S: Final = 5.0


class PlayedNode:
    """Of all namespaces. One thread; ``close`` joins it. Attributes may be set by the test at any time."""

    def __init__(self, admin: KubeHttp) -> None:
        """It works."""
        self._admin = admin
        self.start_s = 0.0
        """From placed to ready."""
        self.stop_s = 0.0
        """From told to go to gone."""
        self.never_ready: Callable[[Object], bool] = lambda pod: False
        self.death_of: Callable[[Object], Object | None] = lambda pod: None
        """How a pod's first container ends, again and again: a ``terminated`` state. None: it lives."""
        self.waits_for: Callable[[Object], Object | None] = lambda pod: None
        """What it waits for instead of being started: a ``waiting`` state. None: nothing."""
        self.life_s = 0.5
        """Of a container that dies."""
        self._seen: dict[tuple[str, str], float] = {}
        """When a pod was first seen in this state."""
        self._num_addresses = 0
        self._beat_at = 0.0
        self._rounds = Rounds("played node", self._look, _POLL_S)

    def close(self) -> None:
        """It has stopped. Raises what it died of."""
        self._rounds.close()

    def _look(self) -> None:
        try:
            self._beat()
            for pod in self._admin.ask("GET", "/api/v1/pods").body.get("items", ()):
                self._serve(pod)
        except OSError:
            return  # The API server is away: a kubelet waits too.

    def _serve(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if "nodeName" not in pod["spec"]:
            self._ask("POST", f"{path}/binding", _binding(metadata["name"]))
        elif metadata.get("deletionTimestamp"):
            if self._is_due(metadata["uid"], "going", self.stop_s):
                options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
                self._ask("DELETE", path, options)
        elif waiting := self.waits_for(pod):
            self._tell(path, pod, {"waiting": waiting})
        elif ended := self.death_of(pod):
            self._let_die(path, pod, ended)
        elif not is_ready(pod) and not self.never_ready(pod) and self._is_due(metadata["uid"], "new", self.start_s):
            self._ask("PATCH", f"{path}/status", {"status": self._ready_status()}, content_type=MERGE_PATCH)

    def _let_die(self, path: str, pod: Object, ended: Object) -> None:
        """The kubelet starts it anew at once, and says so in the same word."""
        restarts = restarts_of(pod) + 1
        if self._is_due(pod["metadata"]["uid"], f"life {restarts}", self.life_s):
            died = {**ended, "startedAt": _now(), "finishedAt": _now()}
            running = {"running": {"startedAt": _now()}}
            self._tell(path, pod, running, restartCount=restarts, lastState={"terminated": died})

    def _tell(self, path: str, pod: Object, state: Object, **rest: object) -> None:
        """What its one container is doing, if that is news."""
        name, image = (pod["spec"]["containers"][0][field] for field in ("name", "image"))
        told = {"name": name, "image": image, "imageID": "", "ready": False, "restartCount": 0, "state": state, **rest}
        before = [one["state"] for one in pod["status"].get("containerStatuses", ())]
        if before != [state] or "lastState" in rest:
            conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": _now()}]
            found = {"phase": "Pending", "conditions": conditions, "containerStatuses": [told]}
            self._ask("PATCH", f"{path}/status", {"status": found}, content_type=MERGE_PATCH)

    def _is_due(self, uid: str, state: str, after_s: float) -> bool:
        return time.monotonic() >= self._seen.setdefault((uid, state), time.monotonic()) + after_s

    def _ask(self, method: str, path: str, body: Object, **rest: str) -> None:
        """A pod may be gone, or changed, by now: it is looked at again."""
        answer = self._admin.ask(method, path, body, **rest)
        assert answer.status < 400 or answer.status in (404, 409, 429, 500, 503), (method, path, answer)

    def _ready_status(self) -> Object:
        self._num_addresses += 1
        high, low = divmod(self._num_addresses, 250)
        address = f"10.99.{high}.{low + 1}"
        kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": _now()} for kind in kinds]
        return {"phase": "Running", "conditions": conditions, "podIP": address, "podIPs": [{"ip": address}]}

    def _beat(self) -> None:
        """The node is there and well, for the controllers that watch nodes."""
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + _BEAT_S
        if self._admin.ask("GET", f"/api/v1/nodes/{NODE}").status == 404:
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
            self._ask("POST", "/api/v1/nodes", node)
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": _now()}
        self._ask(
            "PATCH", f"/api/v1/nodes/{NODE}/status", {"status": {"conditions": [ready]}}, content_type=MERGE_PATCH
        )


def restarts_of(pod: Object) -> int:
    return sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ()))


def is_ready(pod: Object) -> bool:
    """And stays: a pod that was told to go is no longer counted by anybody."""
    conditions = pod.get("status", {}).get("conditions", ())
    is_true = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return is_true and not pod["metadata"].get("deletionTimestamp")


def _binding(name: str) -> dict[str, Any]:
    target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
