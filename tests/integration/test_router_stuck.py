"""A decode engine whose probes are well takes up nothing: its waiting requests go where one is taken up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.engine import FakeEngine
from fakes.faults import Gate
from fakes.http import RawClient
from fakes.router import PROMPT, STREAM, Rig, running_rig, send, until
from integration.test_router_gone import answer_to, asked_of, is_blamed
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role

pytestmark = pytest.mark.anyio

LIMIT_S = 0.4
SOON: dict[str, Any] = {"idle_timeout_s": LIMIT_S}
LOCAL = {**PROMPT, "echo": True}


async def ask_one_that_is_stuck(rig: Rig, body: dict[str, Any]) -> tuple[RawClient, FakeEngine, FakeEngine]:
    """The client, the engine with its request, and the other one. Neither takes anything up."""
    for engine in rig.decodes:
        engine.close_gate(Gate.RESERVE)
    return await send(rig, body), *(await asked_of(rig.decodes))


@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["plain", "stream"])
async def test_it_leaves_for_an_engine_that_is_free(body: dict[str, Any]) -> None:
    async with running_rig(num_decode=2, **SOON) as rig:
        client, stuck, other = await ask_one_that_is_stuck(rig, body)
        other.open_gate(Gate.RESERVE)
        assert (await answer_to(client)).status == 200
        assert len(other.seen) == 1
        assert await rig.failures() == {"decode_lost": 1}
        assert is_blamed(rig, stuck)
        await stuck.seen[0].ended.wait()
        assert stuck.seen[0].is_disconnected


@pytest.mark.parametrize("gate", [Gate.PREFILL, Gate.SECOND_TOKEN], ids=["reserves", "begins answers"])
async def test_it_leaves_for_an_engine_that_takes_up_others(gate: Gate) -> None:
    async with running_rig(num_decode=2, **SOON) as rig:
        client, stuck, other = await ask_one_that_is_stuck(rig, PROMPT)
        other.open_gate(Gate.RESERVE)
        holds = rig.prefill if gate is Gate.PREFILL else other
        holds.close_gate(gate)
        streams = []
        async with asyncio.timeout(PATIENCE_S):
            while not stuck.seen[0].is_disconnected:
                streams.append(await send(rig, STREAM))  # The other one is never free.
                await asyncio.sleep(LIMIT_S / 10)
        holds.open_gate(gate)
        assert (await answer_to(client)).status == 200


@pytest.mark.parametrize("num_decode", [1, 2])
async def test_it_stays_where_none_takes_up_anything(num_decode: int) -> None:
    async with running_rig(num_decode=num_decode, **SOON) as rig:
        for engine in rig.decodes:
            engine.close_gate(Gate.RESERVE)
        clients = [await send(rig, PROMPT) for _ in range(num_decode)]
        await until(lambda: all(engine.seen for engine in rig.decodes))
        await asyncio.sleep(3 * LIMIT_S)
        for engine in rig.decodes:
            engine.open_gate(Gate.RESERVE)
        assert [(await answer_to(client)).status for client in clients] == [200] * num_decode
        assert await rig.failures() == {}


async def test_it_stays_where_the_other_engine_is_not_healthy() -> None:
    async with running_rig(num_decode=2, probe_interval_s=0.05, **SOON) as rig:
        client, own, other = await ask_one_that_is_stuck(rig, PROMPT)
        other.health_status = 500  # It says nothing of the engine's core.
        await until(lambda: not all(one.is_healthy for one in rig.router.services.engines[Role.DECODE]))
        await asyncio.sleep(3 * LIMIT_S)
        own.open_gate(Gate.RESERVE)
        assert (await answer_to(client)).status == 200
        assert not other.seen
        assert await rig.failures() == {}


@pytest.mark.parametrize(
    ("body", "gate", "more"),
    [
        (LOCAL, Gate.ANSWER, {}),  # A whole answer may take its time, and nothing is heard of it before.
        (LOCAL | STREAM, Gate.ANSWER, {}),  # Decode prefills it by itself, which may take its time too.
        (PROMPT, Gate.RESERVE, {"max_decode_attempts": 1}),
        (PROMPT, Gate.ANSWER, {}),  # It has reserved.
    ],
    ids=["a whole answer", "a stream without a transfer", "one attempt", "reserved"],
)
async def test_it_stays_where_it_may_not_leave(body: dict[str, Any], gate: Gate, more: dict[str, Any]) -> None:
    async with running_rig(num_decode=2, **SOON, **more) as rig:
        for engine in rig.decodes:
            engine.close_gate(gate)
        client = await send(rig, body)
        _, other = await asked_of(rig.decodes)
        await asyncio.sleep(3 * LIMIT_S)
        for engine in rig.decodes:
            engine.open_gate(gate)
        assert (await answer_to(client)).status == 200
        assert not other.seen
        assert await rig.failures() == {}
