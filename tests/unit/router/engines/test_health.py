"""Who is probed, and whose first probe is waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.least_tokens import least_tokens
from pdcluster_router.core.membership import Member
from pdcluster_router.engines.health import Probes
from pdcluster_router.engines.roster import Roster
from pdcluster_router.http.connections import PoolLimits
from pdcluster_router.settings import build_settings

pytestmark = pytest.mark.anyio


async def test_an_engine_that_goes_before_its_first_answer_is_not_waited_for() -> None:
    asked = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = build_settings(prefill_urls=[url], decode_urls=[url], probe_timeout_s=EDGE_S)
    roster = Roster(PoolLimits(4, EDGE_S, EDGE_S), least_tokens, lambda: None, lambda _: None, time.monotonic)
    roster.update([Member(url, Role.PREFILL)])
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(PATIENCE_S):
        probes = Probes(tasks, roster, settings)
        probes.follow()
        waiting = asyncio.create_task(probes.has_asked_all())
        await asked.wait()
        assert not waiting.done()
        roster.update([])
        probes.follow()
        await waiting
        probes.stop()
    await roster.close()
    server.close()
