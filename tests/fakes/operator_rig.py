"""The operator's parts on a fake API server, with pods, routers and engines that are as a test says.

``Rig`` runs one reconciler without kopf: the test itself brings the caches up to date. ``running_operator`` is a whole
replica, kopf's watches and all.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from fakes.api_server import ApiServer, Fault, is_parting, selects
from fakes.api_store import ApiStore, Object
from operator_cases.objects import pdcluster
from patience import EDGE_S, PATIENCE_S
from pdcluster_kube.access import KubeAccess
from pdcluster_kube.session import open_session
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.manifests.pool import INTERNAL_PORT
from pdcluster_operator.core.seen.object_views import view_of
from pdcluster_operator.http_kube import Fence, HttpKube
from pdcluster_operator.kinds import DEPLOYMENT, PDCLUSTER, POD, WATCHED_CHILDREN, selector_of
from pdcluster_operator.pool_secrets import PoolSecrets
from pdcluster_operator.reconcile import Reconciler
from pdcluster_operator.replica import Operator
from pdcluster_operator.settings import Settings
from pdcluster_operator.verify import TargetVerifier
from pdcluster_protocol import labels
from pdcluster_protocol.verify import VERIFY_PATH, VerifyOrder, parse_order

KEY = Key("default", "pool")
AT = ("pdclusters", "default", "pool")
SECRET = ("secrets", "default", "pool-secret")
IMAGE = "pdcluster:1"


class LocalResolver(AbstractResolver):
    """Every name is this machine, and a router's internal port is the fake one's."""

    def __init__(self, router_port: Callable[[], int]) -> None:
        self._router_port = router_port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        port = self._router_port() if port == INTERNAL_PORT else port
        address = ResolveResult(
            hostname=host, host="127.0.0.1", port=port, family=socket.AF_INET, proto=0, flags=socket.AI_NUMERICHOST
        )
        return [address]

    async def close(self) -> None:
        pass


def strangers_session(router_port: Callable[[], int] = lambda: INTERNAL_PORT) -> aiohttp.ClientSession:
    """For routers, by whatever name."""
    connector = aiohttp.TCPConnector(resolver=LocalResolver(router_port))
    return aiohttp.ClientSession(connector=connector, auto_decompress=False)


@dataclass
class FakeRouter:
    """Answers verifications. ``answers``: status and message, one after the other; then 200. The message of a redirect
    is its place."""

    answers: list[tuple[int, str]] = field(default_factory=list)
    orders: list[VerifyOrder] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    """By which name and port each order came."""
    port: int = 0
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, nobody is answered."""

    async def verify(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.orders.append(parse_order(self.bodies[-1]))
        self.hosts.append(request.host)
        await self.is_open.wait()
        self.passes.append(request.headers["Authorization"])
        status, message = self.answers.pop(0) if self.answers else (200, "")
        body = {"verified": True} if status == 200 else {"error": {"message": message}}
        place = {"Location": message} if 300 <= status < 400 else {}
        return web.json_response(body, status=status, headers=place)


@asynccontextmanager
async def running_router(*answers: tuple[int, str], context: ssl.SSLContext | None = None) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(list(answers))
    router.is_open.set()
    app = web.Application()
    app.router.add_post(VERIFY_PATH, router.verify)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    router.port = runner.addresses[0][1]
    try:
        yield router
    finally:
        await runner.cleanup()


def pool(router: FakeRouter, changes: Mapping[str, object] | None = None) -> Object:
    """The smallest PDCluster, whose routers are the fake one."""
    return pdcluster({"spec.router.service.port": router.port, **(changes or {})})


def settle(store: ApiStore) -> None:
    """What Kubernetes does: every workload has the pods that it asks for, all ready; what was removed is gone. Routers'
    pods are as the test has made them."""
    deployments = store.all_of("deployments")
    wanted: dict[str, Object] = {}
    for one in deployments:
        replicas = one["spec"]["replicas"]
        store.merge(_at(one), {"status": {"replicas": replicas, "readyReplicas": replicas}})
        if labels.ROLE in one["metadata"]["labels"]:
            wanted |= {f"{one['metadata']['name']}-{index}": one for index in range(replicas)}
    for pod in store.all_of("pods"):
        if pod["metadata"]["name"] not in wanted and labels.ROLE in pod["metadata"]["labels"]:
            store.delete(_at(pod))
    for name, owner in wanted.items():
        if ("pods", "default", name) not in store.objects:
            store.create(("pods", "default", name), _pod(owner))


def _pod(owner: Object) -> Object:
    own = owner["spec"]["template"]["metadata"]["labels"]
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": own}, "spec": {}, "status": ready}


def _at(body: Object) -> tuple[str, str, str]:
    plural = {"Deployment": "deployments", "Pod": "pods"}[body["kind"]]
    return plural, body["metadata"]["namespace"], body["metadata"]["name"]


class Rig:
    """One reconciler, and what it talks to."""

    def __init__(
        self, api: ApiServer, router: FakeRouter, sessions: tuple[aiohttp.ClientSession, ...], fence: Fence | None
    ) -> None:
        self.api = api
        self.router = router
        self.sessions = sessions
        self.caches = Caches()
        self.kube = HttpKube(sessions[0], api.url, timeout_s=EDGE_S, fence=fence)
        self.told: list[Key] = []
        self.watched: Callable[[Object], Object] = lambda body: body
        """An object as a watch shows it."""
        secrets = PoolSecrets(self.kube, believe_s=600.0)
        self.verifier = TargetVerifier(sessions[1], secrets, timeout_s=EDGE_S, on_result=self.told.append)
        self.reconciler = Reconciler(
            self.kube,
            self.caches,
            self.verifier,
            secrets,
            Settings(router_image=IMAGE, lease_namespace="system", identity="me"),
            has_leader_worker_sets=False,
        )

    @property
    def store(self) -> ApiStore:
        return self.api.store

    def sync(self) -> None:
        """The caches show what watches show: what is there, but of children only ours."""
        kinds = {kind.plural: selector_of(kind) for kind in (PDCLUSTER, POD, *WATCHED_CHILDREN)}
        found = [(at[0], stored.body) for at, stored in self.store.objects.items() if at[0] in kinds]
        there = [body for plural, body in found if selects(kinds[plural], body)]
        uids = {body["metadata"]["uid"] for body in there}
        for kind in (PDCLUSTER, POD, *WATCHED_CHILDREN):
            for view in self.caches.of_kind(kind):
                if view.uid not in uids:
                    self.caches.drop(view.ref, view.uid)
        for body in there:
            self.caches.put(view_of(self.watched(body)))

    async def look(self) -> float | None:
        """One reconcile of what is there."""
        self.sync()
        return await self.reconciler.reconcile(KEY)

    async def look_until_still(self) -> None:
        """Kubernetes and the operator by turns, until nothing changes any more."""
        for _ in range(60):
            before = self.store.num_writes
            await self.look()
            await self.verified()
            settle(self.store)
            if self.store.num_writes == before:
                return
        raise AssertionError("it never comes to rest")

    async def verified(self) -> None:
        """No verification is under way."""
        while self.verifier.num_running:
            await asyncio.sleep(0)

    def condition(self, kind: str) -> dict[str, Any]:
        found = self.store.read(AT)["status"]["conditions"]
        return next(one for one in found if one["type"] == kind)

    def events(self) -> list[str]:
        return [f"{one['type']} {one['reason']}" for one in self.store.all_of("events")]

    def deployments(self) -> dict[str, int]:
        """Replicas of the engines' workloads."""
        found = [one for one in self.store.all_of(DEPLOYMENT.plural) if labels.ROLE in one["metadata"]["labels"]]
        return {one["metadata"]["name"]: one["spec"]["replicas"] for one in found}


@asynccontextmanager
async def running_rig(*answers: tuple[int, str], fence: Fence | None = None) -> AsyncIterator[Rig]:
    """``answers``: the router's, before it verifies."""
    api = ApiServer()
    await api.start()
    async with (
        running_router(*answers) as router,
        open_session(KubeAccess(api.url)) as session,
        strangers_session(lambda: router.port) as strangers,
    ):
        rig = Rig(api, router, (session, strangers), fence)
        try:
            async with verifying(rig):
                yield rig
        finally:
            await api.stop()


async def made(rig: Rig, **changes: object) -> None:
    """A PDCluster is there and has come to rest."""
    rig.store.create(AT, pool(rig.router, changes))
    await rig.look_until_still()


@asynccontextmanager
async def verifying(rig: Rig) -> AsyncIterator[None]:
    """Its verifier runs."""
    task = asyncio.create_task(rig.verifier.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@dataclass
class Replica:
    """A whole operator."""

    api: ApiServer
    operator: Operator
    task: asyncio.Task[None]
    stopped: asyncio.Event

    async def stop(self) -> None:
        """As by SIGTERM."""
        self.stopped.set()
        await self.task

    async def kill(self) -> None:
        """As by SIGKILL, as far as a task can: its goodbye is not heard."""
        self.api.faults.append(Fault(is_parting, 403))
        self.task.cancel()
        await asyncio.wait({self.task})


@asynccontextmanager
async def running_operator(api: ApiServer, identity: str = "a", **values: Any) -> AsyncIterator[Replica]:
    """With a Lease that is lost and won within a second or two."""
    told = {"lease_duration_s": 2.0, "lease_renew_s": 1.2, "lease_retry_s": 0.2, "lease_namespace": "system", "port": 0}
    settings = Settings(router_image=IMAGE, kube_api=api.url, identity=identity, host="127.0.0.1", **{**told, **values})
    stopped = asyncio.Event()

    def router_port() -> int:
        """That of ``pool``."""
        port: int = api.store.read(AT)["spec"]["router"]["service"]["port"]
        return port

    access = KubeAccess(api.url)
    async with open_session(access) as session, strangers_session(router_port) as strangers:
        operator = Operator(settings, access, session, strangers, lambda: None)
        replica = Replica(api, operator, asyncio.create_task(operator.run(stopped)), stopped)
        try:
            yield replica
        finally:
            stopped.set()
            await asyncio.wait({replica.task}, timeout=PATIENCE_S)
