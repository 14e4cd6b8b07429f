"""A real Envoy asks the router which engines get a request: its clients get what the router's own clients get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest

from fakes.http import Message
from fakes.router import BOTH, COMPLETIONS, Rig, orders, running_rig
from gateway.envoy import Envoy, running_envoy
from integration.ports import fresh_port
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

MODES: Final = {
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
    envoy: Any = None,
    **settings: Any,
) -> AsyncIterator[Gatewayed]:
    """At the end of a test that has passed nothing of any request is left in the router."""
    settings["picker_port"] = port = fresh_port()
    async with running_rig(num_prefill=num_prefill, num_decode=num_decode, **settings) as rig:
        urls = [engine.url for engine in rig.decodes]
        async with running_envoy(port, urls, **(modes or {}), **(envoy or {})) as running:
            yield Gatewayed(rig, running)


def same(through: Message, own: Message) -> bool:
    assert through.status == own.status, (through, own)
    assert through.body == own.body
    return through.is_whole == own.is_whole


@EACH_MODE
@BOTH
async def test_an_answer_is_byte_for_byte_the_routers_own(modes: dict[str, str], body: dict[str, Any]) -> None:
    async with gateway(modes) as both:
        through, own = await both.both(body)
        assert same(through, own)
        assert through.headers["content-type"] == own.headers["content-type"]
        by_gateway, by_client = both.rig.decode.seen[1], both.rig.decode.seen[0]
        assert by_gateway.params is not None
        assert by_gateway.params.keys() == (by_client.params or {}).keys()
        assert len(orders(both.rig)) == 2
