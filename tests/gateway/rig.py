"""A router in this process with fake engines behind it, and a real Envoy before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest

from fakes.http import Message, request_bytes
from fakes.router import COMPLETIONS, Rig, running_rig, until
from gateway.envoy import Envoy, running_envoy
from integration.ports import fresh_port
from patience import PATIENCE_S

MODES: Final[dict[str, dict[str, str]]] = {
    "duplex": {},
    "unread": {"response_body_mode": "NONE"},
    "buffered": {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"},
}
EACH_MODE: Final = pytest.mark.parametrize("modes", MODES.values(), ids=MODES)


@dataclass
class Gatewayed:
    """A router with engines, and an Envoy before it."""

    rig: Rig
    envoy: Envoy

    async def both(self, body: object, path: str = COMPLETIONS, **headers: str) -> tuple[Message, Message]:
        """The answer through the gateway, and the router's own."""
        async with asyncio.timeout(PATIENCE_S):
            own = await (await self.rig.client()).post(path, body, headers)
        return await self.envoy.ask(body, path, headers), own


@asynccontextmanager
async def gateway(
    modes: dict[str, str] | None = None,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    envoy: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Gatewayed]:
    """At the end of a test that has passed nothing of any request is left in the router."""
    settings["picker_port"] = port = fresh_port()
    async with running_rig(num_prefill=num_prefill, num_decode=num_decode, **settings) as rig:
        urls = [engine.url for engine in rig.decodes]
        async with running_envoy(port, urls, **(modes or {}), **(envoy or {})) as running:
            yield Gatewayed(rig, running)
            for client in rig.clients:
                client.leave()
            await until(lambda: rig.router.clients.num_open == 0)


def require_same(through: Message, own: Message) -> None:
    assert (through.status, through.body, through.is_whole) == (own.status, own.body, own.is_whole)
    assert through.headers["content-type"] == own.headers["content-type"]
    assert through.headers.get("retry-after") == own.headers.get("retry-after")


async def get(both: Gatewayed, path: str, headers: dict[str, str] | None = None) -> Message:
    client = await both.envoy.client()
    await client.send(request_bytes(path, b"", headers, method="GET"))
    async with asyncio.timeout(PATIENCE_S):
        return await client.receive()
