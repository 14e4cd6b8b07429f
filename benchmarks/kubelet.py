"""Plays the Deployment controller and the kubelets: every Deployment gets its pods, and they are ready immediately.

It stands in for nodes and for the real controller manager, whose client is limited to 20 writes a second. Pods have the
Deployment's whole template and a node's name, so that a deleted pod terminates before it is gone. Deployments only
grow here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from typing import Final

from benchmarks.kube_user import KubeUser, Object

from pdcluster_operator.kinds import DEPLOYMENT, POD
from pdcluster_protocol import labels

_NODE: Final = "node"
_AT_ONCE: Final = 16
"""Deployments that get pods at the same time: as many as the operator has workers."""


class Kubelet:
    """The Deployments and pods of one namespace. Event loop only; one task runs ``run``."""

    def __init__(self, user: KubeUser, namespace: str) -> None:
        self._user = user
        self._namespace = namespace
        self._deployments: dict[str, Object] = {}
        self.engines: dict[tuple[str, str], str] = {}
        """Name of the only Deployment, by PDCluster and role. There is only one, because nothing is rolled out here."""
        self.pods: defaultdict[str, dict[str, bool]] = defaultdict(dict)
        """By Deployment: each pod that is to stay, and whether it is ready."""
        self._num_made: Counter[str] = Counter()
        """Pods made for each Deployment as it grew; pods that replace others do not count."""
        self._told: dict[str, Object] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Gives Deployments their pods, until it is cancelled or the API server refuses a write."""
        async with asyncio.TaskGroup() as tasks:
            async for kind, body in self._user.watch(DEPLOYMENT.path(self._namespace)):
                if kind in ("ADDED", "MODIFIED"):
                    name = body["metadata"]["name"]
                    own = body["metadata"].get("labels") or {}
                    self._deployments[name] = body
                    self.engines[own.get(labels.CLUSTER, ""), own.get(labels.ROLE, "")] = name
                    tasks.create_task(self._settle(name))

    async def set_ready(self, deployment: str, pod: str, *, is_ready: bool) -> None:
        """The statuses of the pod and of its Deployment say whether the pod is ready."""
        await self._user.merge(POD.path(self._namespace, pod, "status"), {"status": _pod_status(is_ready)})
        self.pods[deployment][pod] = is_ready
        await self._tell(deployment)

    async def remove_pod(self, deployment: str, pod: str) -> None:
        """The pod terminates, and still exists."""
        await self._user.delete(POD.path(self._namespace, pod))
        del self.pods[deployment][pod]
        await self._tell(deployment)

    async def replace_pod(self, deployment: str, pod: str) -> str:
        """The terminating pod is gone, and a new pod exists that is not ready yet. Returns the name of the new pod."""
        await self._user.delete(POD.path(self._namespace, pod), is_forced=True)
        return await self._make_pod(deployment)

    async def _settle(self, name: str) -> None:
        async with self._locks[name], self._room:
            while self._num_made[name] < self._deployments[name]["spec"]["replicas"]:
                self._num_made[name] += 1
                pod = await self._make_pod(name)
                await self._user.merge(POD.path(self._namespace, pod, "status"), {"status": _pod_status(True)})
                self.pods[name][pod] = True
            await self._tell(name)

    async def _make_pod(self, deployment: str) -> str:
        name = f"{deployment}-{next(self._numbers)}"
        template = self._deployments[deployment]["spec"]["template"]
        metadata = {**template["metadata"], "name": name, "namespace": self._namespace}
        spec = {**template["spec"], "nodeName": _NODE}
        self.pods[deployment][name] = False
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        await self._user.create(POD.path(self._namespace), body)
        return name

    async def _tell(self, name: str) -> None:
        body, pods = self._deployments[name], self.pods[name]
        num_ready = sum(pods.values())
        status = {
            "observedGeneration": body["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": len(pods),
            "readyReplicas": num_ready,
            "availableReplicas": num_ready,
        }
        if self._told.get(name) != status:
            self._told[name] = status
            await self._user.merge(DEPLOYMENT.path(self._namespace, name, "status"), {"status": status})


def _pod_status(is_ready: bool) -> Object:
    """The part of a pod's status that controllers read."""
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "True" if is_ready else "False"},
    ]
    return {"phase": "Running", "conditions": conditions}
