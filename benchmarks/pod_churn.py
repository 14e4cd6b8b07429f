"""Changes pods while the operator runs, and measures how long each change takes to get into a status.

A touch takes one ready engine of one PDCluster down, and brings it or a replacement up again: two changes. Touches
begin at a steady pace, even while others are under way. Each PDCluster has one touch at a time, so that a status shows
one change. One touch in ten, at random, deletes the pod; the others flip its readiness.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Final

from benchmarks.kube_user import Board, Object
from benchmarks.kubelet import Kubelet
from benchmarks.operator_figures import Lag

from pdcluster_protocol.labels import Role

LIMIT_S: Final = 30.0
"""A change that status does not show within this time is missed."""
DELETED_SHARE: Final = 0.1
_LATE_S: Final = LIMIT_S
"""A touch that would begin later than this after the planned end is left out; the report says that changes are missing.
A touch that is less late is made, so the phase takes longer than planned."""
_REST_S: Final = 0.5
"""Seconds that a pod stays down after status has shown it."""


@dataclass(slots=True)
class Churn:
    """Makes the changes, and keeps their lags. One task owns it. ``pods``, ``clusters``: what their watches show."""

    kubelet: Kubelet
    pods: Board
    clusters: Board
    dice: random.Random
    lags: list[Lag] = field(default_factory=list)
    num_missed: int = 0

    async def run(self, names: Iterable[str], *, seconds: float, num_changes: int) -> None:
        """Makes ``num_changes`` changes to these PDClusters' engines, or fewer if no PDCluster is free in time."""
        idle: asyncio.Queue[str] = asyncio.Queue()
        for name in names:
            idle.put_nowait(name)
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_changes // 2):
                await asyncio.sleep(began + number * 2 * seconds / num_changes - loop.time())
                cluster = await idle.get()
                if loop.time() > began + seconds + _LATE_S:
                    return
                tasks.create_task(self._touch(cluster, idle))

    async def _touch(self, cluster: str, idle: asyncio.Queue[str]) -> None:
        role = self.dice.choice(list(Role))
        deployment = self.kubelet.engines[cluster, role.value]
        pods = self.kubelet.pods[deployment]
        pod, num = self.dice.choice(list(pods)), len(pods)
        if self.dice.random() < DELETED_SHARE:
            await self._change(cluster, role, pod, num - 1, self.kubelet.remove_pod(deployment, pod))
            pod = await self.kubelet.replace_pod(deployment, pod)
            await self.pods.expect(pod, lambda body: True)
        else:
            down = self.kubelet.set_ready(deployment, pod, is_ready=False)
            await self._change(cluster, role, pod, num - 1, down)
            await asyncio.sleep(_REST_S)
        await self._change(cluster, role, pod, num, self.kubelet.set_ready(deployment, pod, is_ready=True))
        idle.put_nowait(cluster)

    async def _change(self, cluster: str, role: Role, pod: str, num_ready: int, change: Awaitable[None]) -> None:
        """Awaits ``change`` and notes its lag. ``num_ready``: what status shows afterwards, and not before."""
        loop = asyncio.get_running_loop()
        in_pod = self.pods.expect_next(pod)
        in_status = self.clusters.expect(cluster, lambda body: _num_ready(body, role) == num_ready)
        began = loop.time()
        try:
            async with asyncio.timeout(LIMIT_S):
                await change
                self.lags.append(Lag(await in_pod - began, await in_status - began))
        except TimeoutError:
            self.num_missed += 1


def _num_ready(body: Object, role: Role) -> int:
    return int(body["status"]["roles"][role.value]["ready"])
