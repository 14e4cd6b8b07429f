"""A real router on a real port with fake engines behind it, for one test."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from fakes.engine import FakeEngine, Seen, Wire
from fakes.http import Message, RawClient, request_bytes
from fakes.reservations import SECRET, reservation_call, reservation_of
from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_router.front.router import Router
from pdcluster_router.front.server import RouterServer, listen
from pdcluster_router.front.server_protocol import RouterProtocol
from pdcluster_router.front.setting_changes import SettingReader
from pdcluster_router.settings.router_settings import Settings, build_settings
from pdcluster_router.telemetry import line_file

PROMPT = {"model": "m", "prompt": "once upon a time"}
STREAM = {**PROMPT, "stream": True}
BOTH = pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["plain", "stream"])
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


PATIENT: Final[Mapping[str, Any]] = {
    "port": 0,
    "drain_timeout_s": 0.0,
    "probe_interval_s": EDGE_S,
    "probe_timeout_s": EDGE_S,
    "connect_timeout_s": EDGE_S,
    "client_read_timeout_s": PATIENCE_S,
    "queue_timeout_s": PATIENCE_S,
    "prefill_timeout_s": PATIENCE_S,
    "request_timeout_s": 2 * PATIENCE_S,
}
"""Limits that no crowded machine reaches: the router, its engines and its clients share one loop here, and a storm may
keep it busy for longer than a user's connect timeout of 3 s. A test of a limit gives its own."""


def params_of(transfer_id: str = "nobody", attempt: int = 1) -> dict[str, Any]:
    """What decode would have been given by a router with our secret."""
    token = SECRET.mint(TransferId(transfer_id), Attempt(attempt), 1000)
    return {"transfer_id": transfer_id, "attempt": attempt, "deadline_ms": 1000, "token": token}


@dataclass(kw_only=True)
class Peers:
    """A router's engines and clients."""

    prefills: list[FakeEngine]
    decodes: list[FakeEngine]
    clients: list[RawClient] = field(default_factory=list)
    """All of them, so that none hangs up because a test has forgotten it."""

    @property
    def prefill(self) -> FakeEngine:
        return self.prefills[0]

    @property
    def decode(self) -> FakeEngine:
        return self.decodes[0]

    async def connect(self, url: str) -> RawClient:
        self.clients.append(await RawClient.connect(url))
        return self.clients[-1]


@dataclass
class Rig(Peers):
    """A router in this process and its peers, and what tests ask of them."""

    server: RouterServer
    url: str

    @property
    def router(self) -> Router:
        return self.server.router

    async def client(self) -> RawClient:
        client = await self.connect(self.url)
        if self.router.certificate is not None:  # A client is sure of an agreement before the router is.
            await until(lambda: self._find(client) is not None)
        return client

    def change_settings(self, **settings: Any) -> None:
        """The router goes by these from now on. For a limit that holds for a connection's first byte too, which a
        machine that stands still may miss: served first, limited then."""
        self.router.settings = self.router.settings.model_copy(update=settings)

    async def served_client(self) -> RawClient:
        """One whose connection has had an answer."""
        client = await self.client()
        assert (await client.get("/health")).status == 200
        return client

    async def pass_time(self, seconds: float) -> None:
        """So much passes by the router's own clock, which may be a ``RunningClock``."""
        now = self.router.services.now
        until_s = now() + seconds
        await until(lambda: now() >= until_s)

    async def internal(self) -> RawClient:
        """A client of the internal port."""
        return await self.connect(self.internal_url)

    async def reserve(self, reservation: object) -> Message:
        """The router's answer to this metaserver call, sealed as an engine of its cluster would."""
        call = await self.internal()
        await call.send(reservation_call(reservation))
        return await call.receive()

    @property
    def internal_url(self) -> str:
        scheme = "http" if self.router.internal_certificate is None else "https"
        return f"{scheme}://127.0.0.1:{self.router.settings.internal_port}"

    def feed(self, client: RawClient, raw: bytes) -> None:
        """The router gets ``raw`` from this client now, before the loop runs anything else."""
        self.connection_of(client).data_received(raw)

    def connection_of(self, client: RawClient) -> RouterProtocol:
        """The router's end of this client's connection."""
        found = self._find(client)
        assert found is not None, "the router has no such connection"
        return found

    def _find(self, client: RawClient) -> RouterProtocol | None:
        port = client.writer.get_extra_info("sockname")[1]
        for connection in self.server.server_state.connections:
            if isinstance(connection, RouterProtocol) and connection.client and connection.client[1] == port:
                return connection
        return None

    async def metric(self, name: str) -> float:
        """The value of one sample, by its whole name with labels."""
        text = (await (await self.internal()).get("/metrics")).body.decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return float(values[name])

    async def failures(self) -> dict[str, int]:
        """How often each kind of failure was counted; only those that were."""
        text = (await (await self.internal()).get("/metrics")).body.decode()
        found = re.findall(r'^pdcluster_router_failures_total{kind="(\w+)"} (\d+)', text, re.MULTILINE)
        return {kind: int(count) for kind, count in found if int(count)}

    async def settled(self) -> None:
        """Nothing of any request is left in the router."""
        services = self.router.services
        await until(lambda: not services.running and not services.transfers and not services.divided)
        await until(lambda: all(engine.pool.num_busy == 0 for engine in services.all_engines()))
        assert all(engine.load.outstanding_tokens == 0 for engine in services.all_engines())
        assert (services.num_queued, self.router.clients.parts.num_taken) == (0, 0)
        assert not any(admission.backlog_tokens for admission in services.admissions)
        assert all(use.num_running == 0 for _, use in self.router.access.uses.all())


async def until(is_true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Lets the loop run until ``is_true``; a crowded machine may stand still for seconds.

    Looks at every turn of the loop at first, for what passes quickly, and then each millisecond: tests run beside it.
    """
    num_turns = 0
    async with asyncio.timeout(timeout_s):
        while not is_true():
            num_turns += 1
            await asyncio.sleep(0 if num_turns < 100 else 0.001)


@asynccontextmanager
async def running_rig(
    *, num_prefill: int = 1, num_decode: int = 1, engine_tls: Any = None, models: Sequence[bytes] = (), **settings: Any
) -> AsyncIterator[Rig]:
    """A router and its engines; at the end of a test that has passed nothing of any request is left. ``engine_tls``: an
    SSLContext, where engines have TLS. ``models``: the list of each engine, of prefill engines first."""
    wire = Wire()
    prefills = [FakeEngine(wire) for _ in range(num_prefill)]
    decodes = [FakeEngine(wire) for _ in range(num_decode)]
    for engine, answer in zip((*prefills, *decodes), models, strict=False):
        engine.models = answer
    for engine in (*prefills, *decodes):
        await engine.start(tls=engine_tls)
    urls = {"prefill_urls": [e.url for e in prefills], "decode_urls": [e.url for e in decodes]}
    try:
        async with running_server(**{**urls, **settings}) as (server, url):
            await until(lambda: all(engine.is_healthy for engine in server.router.services.all_engines()))
            rig = Rig(server, url, prefills=prefills, decodes=decodes)
            yield rig
            await rig.settled()
    finally:
        for engine in (*prefills, *decodes):
            await engine.stop()


@asynccontextmanager
async def running_server(
    reread: Callable[[], Settings] | None = None, /, **settings: Any
) -> AsyncIterator[tuple[RouterServer, str]]:
    """A router and its URL; at the end nothing of it is left, and all its lines are in their files. ``reread``: what it
    is told when it is to read its settings anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_file, "_CLOSE_S", PATIENCE_S)
        async with _server(settings, reread) as server:
            yield server


@asynccontextmanager
async def _server(
    settings: Mapping[str, Any], reread: Callable[[], Settings] | None
) -> AsyncIterator[tuple[RouterServer, str]]:
    told = build_settings(**{**PATIENT, **settings})
    sockets, checked = listen(told)
    server = RouterServer(checked, SECRET, None if reread is None else SettingReader(told, reread))
    await server.start(sockets)
    try:
        yield server, f"http{'' if checked.tls_cert is None else 's'}://127.0.0.1:{checked.port}"
    finally:
        await server.shutdown(sockets)


def raw(body: object = PROMPT, **headers: str) -> bytes:
    """The bytes of a request."""
    return request_bytes(COMPLETIONS, json.dumps(body).encode(), headers)


async def send(rig: Rig, body: object = PROMPT, **headers: str) -> RawClient:
    """A request is on its way; its answer is the test's to read."""
    client = await rig.client()
    await client.send(raw(body, **headers))
    return client


async def post(rig: Rig, body: object = PROMPT, headers: dict[str, str] | None = None) -> Message:
    """The answer to a request."""
    async with asyncio.timeout(PATIENCE_S):
        return await (await rig.client()).post(COMPLETIONS, body, headers)


async def lose(rig: Rig, seen: Seen, attempt: int, **changes: Any) -> RawClient:
    """Decode posts its reservation again, and says that ``attempt`` is lost."""
    call = await rig.internal()
    changes = {"lost_attempt": attempt, "lost_reason": "rank 0 of 10.1.2.3:6000 is silent", "deadline_ms": 7, **changes}
    await call.send(reservation_call(reservation_of(seen.params or {}, **changes)))
    return call


async def outcome_of(call: RawClient) -> tuple[str, str, str]:
    """Status, action and reason of the metaserver's reply."""
    async with asyncio.timeout(PATIENCE_S):
        outcome = (await call.receive()).json()
    return outcome["status"], outcome["action"], outcome["reason"]


def orders(rig: Rig) -> list[Seen]:
    """What all prefill engines were asked, by engine."""
    return [seen for engine in rig.prefills for seen in engine.seen]


def attempts(rig: Rig) -> list[int]:
    """The attempt numbers that prefill engines were given."""
    return sorted((seen.params or {})["attempt"] for seen in orders(rig))
