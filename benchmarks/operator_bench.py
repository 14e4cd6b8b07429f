"""One API server and one operator, and their users and kubelets, which this program plays. Takes snapshots of all."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from aiohttp import web
from benchmarks.kube_user import METADATA_ONLY, Board, KubeUser, Object
from benchmarks.kubelet import Kubelet
from benchmarks.operator_figures import Snapshot
from benchmarks.operator_plane import (
    OperatorProcess,
    admin_access,
    install_chart,
    make_namespace,
    read_usage,
    running_plane,
)

from pdcluster_kube.session import open_session
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import PDCLUSTER, POD, WATCHED_CHILDREN
from pdcluster_protocol.verify import VERIFY_PATH

NAMESPACE: Final = "pools"
EXAMPLE: Final = Path(__file__).resolve().parents[1] / "examples" / "cpu.yaml"
AT_ONCE: Final = 16
"""Writes of users at a time, and of the bare loop: as many as the operator has workers."""
READY_LIMIT_S: Final = 600.0

_CALL_LIMIT_S: Final = 60.0
_QUIET_S: Final = 2.0


@dataclass
class Bench:
    """All parts of a running benchmark. One event loop."""

    user: KubeUser
    kube: HttpKube
    kubelet: Kubelet
    pods: Board
    clusters: Board
    session: aiohttp.ClientSession
    operator: OperatorProcess
    pids: dict[str, int]
    router_port: int

    async def snapshot(self) -> Snapshot:
        counts = await self.operator.read_counts(self.session)
        usages = {who: read_usage(pid) for who, pid in self.pids.items()}
        return Snapshot(time.monotonic(), usages, counts, self.user.num_writes)

    async def create_pools(self, names: Iterable[str]) -> None:
        """The pools exist with one engine of each role, and are Ready."""
        path = PDCLUSTER.path(NAMESPACE)
        await at_once(self.user.create(path, pool_document(name, self.router_port)) for name in names)
        await self._until_ready(names, generation=1)

    async def scale_pools(self, names: Iterable[str], engines: int) -> None:
        """Each pool has ``engines`` engines of each role, and is Ready again."""
        change = {"spec": {"roles": {role: {"replicas": engines} for role in ("prefill", "decode")}}}
        await at_once(self.user.merge(PDCLUSTER.path(NAMESPACE, name), change) for name in names)
        await self._until_ready(names, generation=2)

    async def until_quiet(self) -> None:
        """The operator has written nothing for ``_QUIET_S``."""
        before = -1
        async with asyncio.timeout(READY_LIMIT_S):
            while (now := (await self.operator.read_counts(self.session)).num_writes) != before:
                before = now
                await asyncio.sleep(_QUIET_S)

    async def versions(self) -> dict[str, str]:
        """The resourceVersion of every PDCluster and each of its children, by uid. Lists them anew, without a cache."""
        found: dict[str, str] = {}
        for kind in (PDCLUSTER, *WATCHED_CHILDREN):
            listed = await self.kube.list_metadata(kind, NAMESPACE)
            found |= {one.uid: one.resource_version for one in listed}
        return found

    async def _until_ready(self, names: Iterable[str], generation: int) -> None:
        """
        Raises:
            TimeoutError: Not all of them are Ready within ``READY_LIMIT_S``.
        """
        async with asyncio.timeout(READY_LIMIT_S):
            await asyncio.gather(*(self.clusters.expect(name, lambda one: is_ready(one, generation)) for name in names))


def is_ready(cluster: Object, generation: int) -> bool:
    """Whether it is Ready for this generation of its spec."""
    status = cluster.get("status") or {}
    truths = {one["type"]: one["status"] for one in status.get("conditions", ())}
    return truths.get("Ready") == "True" and status.get("observedGeneration") == generation


def pool_document(name: str, router_port: int) -> Object:
    """``examples/cpu.yaml`` under another name; its routers' Service has the stub's port."""
    found: Object = yaml.safe_load(EXAMPLE.read_text())
    spec = found["spec"]
    router = {**spec["router"], "replicas": 1, "service": {"port": router_port}}
    return {**found, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": {**spec, "router": router}}


async def at_once(work: Iterable[Awaitable[Any]]) -> None:
    """Awaits all of ``work``, ``AT_ONCE`` at a time, begun in order."""
    left = iter(work)

    async def go_on() -> None:
        for one in left:
            await one

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(go_on())


@asynccontextmanager
async def running_bench(folder: Path) -> AsyncIterator[Bench]:
    """The operator leads, and there is no PDCluster yet. ``folder``: empty."""
    async with AsyncExitStack() as stack:
        plane = stack.enter_context(running_plane(folder))
        install_chart(plane)
        make_namespace(plane, NAMESPACE)
        session = await stack.enter_async_context(open_session(admin_access(plane, folder)))
        own = await stack.enter_async_context(aiohttp.ClientSession())
        port = await stack.enter_async_context(_running_stub())
        operator = OperatorProcess(plane, folder, port)
        stack.callback(operator.kill)
        await operator.wait_until_leading(own)
        pids = {"operator": operator.pid, **plane.pids(), "this program": os.getpid()}
        del pids["controller-manager"]
        user, kube = KubeUser(session, plane.url), open_kube(session, plane.url)
        bench = Bench(user, kube, Kubelet(user, NAMESPACE), Board(), Board(), own, operator, pids, port)
        async with _in_background(
            bench.kubelet.run,
            lambda: bench.clusters.follow(user, PDCLUSTER.path(NAMESPACE)),
            lambda: bench.pods.follow(user, POD.path(NAMESPACE), METADATA_ONLY),
        ):
            yield bench


def open_kube(session: aiohttp.ClientSession, url: str) -> HttpKube:
    """The operator's own client, with leave to write."""
    return HttpKube(session, url, timeout_s=_CALL_LIMIT_S, fence=None)


@asynccontextmanager
async def _in_background(*works: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """``works`` run until the block ends. A work that fails ends the block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_run(work)) for work in works]
        yield
        for task in running:
            task.cancel()


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()
    raise RuntimeError("a watch has ended by itself")


@asynccontextmanager
async def _running_stub() -> AsyncIterator[int]:
    """A stub of every pool's routers runs, which says at once that the transfer works. Yields its port."""

    async def verify(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"verified": True})

    app = web.Application()
    app.router.add_post(VERIFY_PATH, verify)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
