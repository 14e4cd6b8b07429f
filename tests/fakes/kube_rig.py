"""A real router that finds fake engines through a fake API server, for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fakes.api_server import ApiServer
from fakes.engine import FakeEngine, Wire
from fakes.router import Rig, post, running_server, until
from fakes.slices import endpoint, slice_of
from pdcluster_router.engines.engine import Engine


@dataclass
class Listed:
    """How one engine stands in its slice."""

    name: str
    role: str
    revision: str


@dataclass
class FoundRig(Rig):
    """A ``Rig`` whose engines come and go while the router runs."""

    def known(self, engine: FakeEngine) -> Engine | None:
        """What the router has of it."""
        return next((one for one in self.router.services.all_engines() if one.url == engine.url), None)

    def state(self, engine: FakeEngine) -> str:
        """What the router thinks of it; empty when it does not know it."""
        known = self.known(engine)
        return known.state.value if known is not None else ""

    async def usable(self, *engines: FakeEngine) -> None:
        """All of these can be given work, and no timer of the rig would have done it: those are at 60 s."""

        def is_usable(engine: FakeEngine) -> bool:
            known = self.known(engine)
            return known is not None and known.is_healthy and known.state.value == "serving"

        await until(lambda: all(is_usable(engine) for engine in engines))

    async def becomes(self, engine: FakeEngine, state: str) -> None:
        """That is what the router thinks of it; no timer, as with ``usable``."""
        await until(lambda: self.state(engine) == state)


@dataclass
class KubeRig(FoundRig):
    """A ``Rig`` whose engines come, change and go in the API server."""

    api: ApiServer = field(default_factory=ApiServer)
    wire: Wire = field(default_factory=Wire)
    listed: dict[str, Listed] = field(default_factory=dict)

    async def start(self, role: str, revision: str = "r1", **conditions: bool | None) -> FakeEngine:
        """An engine runs and is listed; the router need not know yet."""
        engine = FakeEngine(self.wire)
        await engine.start()
        (self.prefills if role == "prefill" else self.decodes).append(engine)
        self.listed[engine.url] = Listed(f"s{len(self.listed)}", role, revision)
        self.mark(engine, **conditions)
        return engine

    def mark(self, engine: FakeEngine, **conditions: bool | None) -> None:
        """Its endpoint has these conditions now."""
        listed = self.listed[engine.url]
        host, _, port = engine.url.removeprefix("http://").partition(":")
        own = endpoint(host, f"uid-{listed.name}", **conditions)
        self.api.put(slice_of(listed.name, listed.role, own, revision=listed.revision, port=int(port)))

    def terminate(self, engine: FakeEngine) -> None:
        """As the endpoint controller says it of a pod that is deleted and still answers."""
        self.mark(engine, ready=False, serving=True, terminating=True)

    def mark_now(self, engine: FakeEngine, *, is_terminating: bool) -> None:
        """The router is told before the loop runs anything else, as if the API server's word had come first."""
        roster = self.router.services.roster
        members = [replace(m, is_terminating=is_terminating) if m.url == engine.url else m for m in roster.members]
        roster.update(members)

    def unlist(self, engine: FakeEngine) -> None:
        """No slice names it any more."""
        self.api.delete(self.listed[engine.url].name)


@asynccontextmanager
async def running_kube_rig(*, pairs: int = 1, **settings: Any) -> AsyncIterator[KubeRig]:
    """A router whose pool has ``pairs`` prefill and decode engines of revision r1."""
    api = ApiServer()
    await api.start()
    found = {"discovery": "kubernetes", "namespace": api.namespace, "cluster": "c", "kube_api": api.url}
    rig: KubeRig | None = None
    try:
        async with running_server(**{**found, **settings}) as (server, url):
            rig = KubeRig(server, url, prefills=[], decodes=[], api=api)
            first = [await rig.start(role) for _ in range(pairs) for role in ("prefill", "decode")]
            await rig.usable(*first)
            yield rig
            await rig.settled()
    finally:
        for engine in (*rig.prefills, *rig.decodes) if rig is not None else ():
            await engine.stop()
        await api.stop()


async def serve(rig: KubeRig, number: int) -> None:
    """One request after the other, each of which is answered."""
    for _ in range(number):
        assert (await post(rig)).status == 200


def num_seen(*engines: FakeEngine) -> list[int]:
    """How many requests each of them got."""
    return [len(engine.seen) for engine in engines]
