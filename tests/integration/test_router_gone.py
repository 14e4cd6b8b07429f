"""Engines that are gone and do not hang up: their connections stay open, and only their probes say so."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from fakes.engine import FakeEngine, Wire
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.messages import MESSAGES
from fakes.router import CHAT, COMPLETIONS, PROMPT, STREAM, Rig, raw, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.outage import Sign
from pdcluster_router.engines.engine import Engine

pytestmark = pytest.mark.anyio

SAYS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: PROMPT,
    CHAT: {"model": "m", "messages": SAYS},
    MESSAGES: {"model": "m", "messages": SAYS, "max_tokens": 9},
}
SOON: dict[str, Any] = {"probe_interval_s": 0.05, "engine_gone_s": 0.3}
"""No other limit of these tests is near: all of them are ``PATIENT``'s, or the defaults."""


async def ask(rig: Rig, path: str = COMPLETIONS) -> RawClient:
    client = await rig.client()
    await client.send(request_bytes(path, json.dumps(BODIES[path]).encode(), {}))
    return client


async def answer_to(client: RawClient) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await client.receive()


async def asked_of(engines: list[FakeEngine]) -> tuple[FakeEngine, FakeEngine]:
    """The engine of these two that has the request, and the other one, which does no wrong any more."""
    await until(lambda: any(engine.seen for engine in engines))
    gone, other = sorted(engines, key=lambda engine: not engine.seen)
    other.fault = Fault.NONE
    return gone, other


async def test_an_engine_that_refuses_connections_answers_on_none_that_has_just_come() -> None:
    """A probe on such a connection would be well for ever, and no request there ever lost: of the fake."""
    engine = FakeEngine(Wire())
    await engine.start()
    opening = asyncio.create_task(asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2])))
    while not engine.num_connections:
        await asyncio.sleep(0)  # No turn of the loop more: what serves the connection has not begun.
    engine.refuse_connections()
    reader, writer = await opening
    writer.write(b"GET /health HTTP/1.1\r\nhost: engine\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionResetError):
            assert await reader.read(1) == b""
    writer.close()
    await engine.stop()


def is_blamed(rig: Rig, gone: FakeEngine) -> bool:
    (engine,) = (one for one in rig.router.services.all_engines() if one.url == gone.url)
    return engine.breaker.has_just_failed


def known(rig: Rig, role: Role = Role.DECODE) -> Engine:
    (engine,) = rig.router.services.engines[role]
    return engine


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
@pytest.mark.parametrize("is_listening", [False, True], ids=["refuses", "says_503"])
async def test_a_plain_answer_of_a_decode_engine_that_is_gone_is_made_by_another(
    path: str, *, is_listening: bool
) -> None:
    async with running_rig(num_decode=2, **SOON) as rig:
        for engine in rig.decodes:
            engine.fault = Fault.HANG
        client = await ask(rig, path)
        gone, other = await asked_of(rig.decodes)
        if is_listening:
            gone.health_status = 503
        else:
            gone.refuse_connections()
        assert (await answer_to(client)).status == 200
        assert len(other.seen) == 1
        assert await rig.failures() == {"decode_lost": 1}
        assert is_blamed(rig, gone)
        await gone.seen[0].ended.wait()
        assert gone.seen[0].is_disconnected


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_where_no_other_engine_is_left_one_error_names_engine_and_cure(path: str) -> None:
    async with running_rig(**SOON) as rig:
        rig.decode.fault = Fault.HANG
        client = await ask(rig, path)
        await rig.decode.next_request()
        rig.decode.refuse_connections()
        answer = await answer_to(client)
        assert answer.status == 502
        message = answer.json()["error"]["message"]
        assert message.startswith("decode-0 ")
        assert " s " in message
        assert "--engine-gone" in message


async def test_an_engine_that_terminates_is_watched_as_long_as_it_has_a_request() -> None:
    async with running_rig(**SOON) as rig:
        rig.decode.fault = Fault.HANG
        client = await ask(rig)
        await rig.decode.next_request()
        roster = rig.router.services.roster
        roster.update([replace(one, is_terminating=one.role is Role.DECODE) for one in roster.members])
        rig.decode.refuse_connections()
        assert (await answer_to(client)).status == 502


async def test_an_engine_that_no_list_names_is_watched_too() -> None:
    async with running_rig(**SOON) as rig:
        rig.decode.fault = Fault.HANG
        client = await ask(rig)
        await rig.decode.next_request()
        rig.router.services.roster.update([Member(rig.prefill.url, Role.PREFILL)])
        rig.decode.refuse_connections()
        assert (await answer_to(client)).status == 502


async def test_an_engine_that_only_stands_still_has_as_long_as_between_two_bytes() -> None:
    async with running_rig(probe_interval_s=0.05, probe_timeout_s=0.1, engine_gone_s=0.3) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        client = await ask(rig)
        await rig.decode.next_request()
        num_before = rig.decode.num_connections
        rig.decode.health_status = None
        await until(lambda: rig.decode.num_connections > num_before + 10)  # More than a second of probes.
        rig.decode.health_status = 200
        await until(lambda: known(rig).is_healthy)
        rig.decode.open_gate(Gate.RESERVE)
        assert (await answer_to(client)).status == 200
        assert await rig.failures() == {}


async def test_an_engine_that_stands_still_for_longer_is_lost() -> None:
    async with running_rig(probe_interval_s=0.05, probe_timeout_s=0.1, idle_timeout_s=0.4) as rig:
        rig.decode.fault = Fault.HANG
        client = await ask(rig)
        await rig.decode.next_request()
        rig.decode.health_status = None
        answer = await answer_to(client)
        assert answer.status == 502
        assert "--idle-timeout" in answer.json()["error"]["message"]


async def test_a_stream_that_flows_from_an_engine_that_shuts_down_is_not_cut() -> None:
    async with running_rig(**SOON) as rig:
        rig.decode.tokens, rig.decode.token_s = ["x"] * 30, 0.05
        client = await send(rig, STREAM)
        await rig.decode.next_request()
        rig.decode.refuse_connections()
        answer = await answer_to(client)
        assert not known(rig).is_healthy
        assert answer.is_whole
        assert b"[DONE]" in answer.body


async def test_a_prompt_at_a_prefill_engine_that_is_gone_goes_to_another() -> None:
    async with running_rig(num_prefill=2, **SOON) as rig:
        for engine in rig.prefills:
            engine.fault = Fault.HANG
        client = await rig.client()
        await client.send(raw(PROMPT))
        gone, other = await asked_of(rig.prefills)
        gone.refuse_connections()
        assert (await answer_to(client)).status == 200
        assert len(other.seen) == 1
        assert await rig.failures() == {"prefill_failed": 1}
        assert is_blamed(rig, gone)


def dead_for_long(engine: Engine, now: float) -> None:
    """Its probes have said so for 1000 s, up to now; none comes during the test."""
    for at in (now - 1000.0, now):
        engine.outage.saw(Sign.DEAD, now=at, most_s=math.inf)


@pytest.mark.parametrize("role", list(Role))
async def test_a_request_at_an_engine_that_fails_its_probes_and_serves_has_its_own_time(role: Role) -> None:
    gate = Gate.RESERVE if role is Role.DECODE else Gate.PREFILL
    async with running_rig(idle_timeout_s=0.4, engine_gone_s=900.0) as rig:
        engine = rig.decode if role is Role.DECODE else rig.prefill
        engine.close_gate(gate)
        dead_for_long(known(rig, role), rig.router.services.now())
        client = await ask(rig)
        await engine.next_request()
        await asyncio.sleep(0.3)  # It is looked at every tenth of a second.
        engine.open_gate(gate)
        assert (await answer_to(client)).status == 200
        assert await rig.failures() == {}


async def test_so_has_its_second_try_with_another_engine() -> None:
    async with running_rig(num_decode=2, idle_timeout_s=0.4, engine_gone_s=900.0) as rig:
        _, second = rig.router.services.engines[Role.DECODE]
        rig.decodes[0].fault = Fault.DIE
        rig.decodes[1].close_gate(Gate.RESERVE)
        second.load.outstanding_tokens = 1 << 20  # So it is asked last.
        dead_for_long(second, rig.router.services.now())
        client = await ask(rig)
        await rig.decodes[1].next_request()
        await asyncio.sleep(0.3)
        rig.decodes[1].open_gate(Gate.RESERVE)
        second.load.outstanding_tokens -= 1 << 20
        assert (await answer_to(client)).status == 200
        assert await rig.failures() == {"decode_lost": 1}
