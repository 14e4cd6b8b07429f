"""Who is probed, whose first probe is waited for, and which answer is that of a healthy engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from fakes.answers import json_answer
from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.policies.least_tokens import least_tokens
from pdcluster_router.engines.health import Probes
from pdcluster_router.engines.roster import Roster
from pdcluster_router.http.connections import PoolLimits
from pdcluster_router.settings.router_settings import build_settings

pytestmark = pytest.mark.anyio


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def probing(
    serve: Serve, now: Callable[[], float] = time.monotonic, interval_s: float = 1.0
) -> AsyncIterator[tuple[Roster, Probes]]:
    """One prefill engine, which ``serve`` plays, is probed."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = build_settings(
        prefill_urls=[url], decode_urls=[url], probe_timeout_s=EDGE_S, probe_interval_s=interval_s
    )
    roster = Roster(PoolLimits(4, EDGE_S, EDGE_S), least_tokens, lambda: None, lambda _: None, now)
    roster.update([Member(url, Role.PREFILL)])
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(PATIENCE_S):
        probes = Probes(tasks, roster, lambda: settings)
        probes.match_roster()
        yield roster, probes
        probes.stop()
    await roster.close()
    server.close()


async def test_an_engine_that_goes_before_its_first_answer_is_not_waited_for() -> None:
    asked = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    async with probing(hear) as (roster, probes):
        waiting = asyncio.create_task(probes.has_asked_all())
        await asked.wait()
        assert not waiting.done()
        roster.update([])
        probes.match_roster()
        await waiting


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (401, False), (404, False), (503, False)])
async def test_an_engine_is_healthy_when_its_health_page_answers_200_and_nothing_else(
    status: int, *, is_healthy: bool
) -> None:
    """A 401 or 404 comes from a server that is no engine, or not ours."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(json_answer(status, b"{}"))
        writer.close()

    async with probing(answer) as (roster, probes):
        await probes.has_asked_all()
        assert [engine.is_healthy for engine in roster.all_engines()] == [is_healthy]


async def test_an_engine_that_is_dead_at_two_probes_was_so_for_the_time_of_a_probe_and_the_pause_after_it() -> None:
    interval_s, num_asked = 0.01, 0
    third = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                num_asked += 1
                if num_asked == 3:
                    third.set()
                writer.write(json_answer(503, b""))
        writer.close()

    async with probing(answer, lambda: num_asked * (EDGE_S + interval_s), interval_s) as (roster, _):
        await third.wait()
        (engine,) = roster.engines[Role.PREFILL]
        assert engine.outage.why_lost(0.0, gone_s=EDGE_S + interval_s / 2, silent_s=math.inf)
