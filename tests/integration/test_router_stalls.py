"""Time limits: an answer that flows is never cut, one that stands is, and so is a client that takes nothing."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from fakes.faults import Fault, Gate
from fakes.http import Message
from fakes.router import PROMPT, STREAM, Rig, running_rig, send
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("running_clock")]


async def answer_of(rig: Rig, body: object) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await send(rig, body)).receive()


def code_of(answer: Message) -> str:
    """Of the error event that the stream was cut with."""
    last = [chunk for chunk in answer.chunks if chunk][-1]
    return str(json.loads(last.removeprefix(b"data: "))["error"]["code"])


def is_blamed(rig: Rig) -> bool:
    """Whether the newest that decode's breaker has heard is a failure."""
    (engine,) = rig.router.services.engines[Role.DECODE]
    return engine.breaker.has_just_failed


async def test_a_stream_may_flow_longer_than_any_limit_but_a_total() -> None:
    async with running_rig(first_byte_timeout_s=2.0, idle_timeout_s=2.0) as rig:
        rig.decode.tokens, rig.decode.token_s = ["x"] * 60, 0.1
        began = time.monotonic()
        answer = await answer_of(rig, STREAM)
        assert answer.is_whole
        assert b"[DONE]" in answer.body
        assert time.monotonic() - began > 4.0


async def test_a_decode_engine_that_stops_in_mid_stream_is_noticed_and_blamed() -> None:
    async with running_rig(idle_timeout_s=0.4) as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        answer = await answer_of(rig, STREAM)
        assert answer.status == 200
        assert not answer.is_whole
        assert code_of(answer) == "stalled"
        assert await rig.failures() == {"decode_stalled": 1}
        assert is_blamed(rig)
        assert await rig.metric('pdcluster_router_requests_total{outcome="timeout"}') == 1
        await rig.decode.seen[0].ended.wait()
        assert rig.decode.seen[0].is_disconnected


async def test_a_client_that_takes_nothing_is_cut_off_and_decode_is_not_blamed() -> None:
    async with running_rig(idle_timeout_s=0.4) as rig:
        rig.decode.padding = "x" * 1_000_000
        rig.decode.tokens = ["y"] * 64
        client = await rig.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
        await client.send(_request(STREAM))
        await rig.decode.next_request()
        async with asyncio.timeout(PATIENCE_S):
            await rig.decode.seen[0].ended.wait()
        await rig.settled()
        assert await rig.failures() == {"client_stalled": 1}
        assert not is_blamed(rig)


async def test_who_is_to_blame_when_no_byte_comes_in_time() -> None:
    async with running_rig(first_byte_timeout_s=0.5) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        assert (await answer_of(rig, STREAM)).status == 504
        assert not is_blamed(rig)  # It waited for prefill.
        rig.decode.fault = Fault.HANG
        assert (await answer_of(rig, STREAM)).status == 504
        assert is_blamed(rig)
        assert await rig.failures() == {"deadline": 2}


async def test_an_answer_that_is_not_streamed_has_a_limit_of_its_own() -> None:
    async with running_rig(first_byte_timeout_s=0.5, idle_timeout_s=0.5, whole_answer_timeout_s=60.0) as rig:
        rig.decode.work_s = 1.5
        assert (await answer_of(rig, PROMPT)).status == 200
        rig.decode.work_s = 30.0
        assert (await answer_of(rig, STREAM)).status == 504
    async with running_rig(whole_answer_timeout_s=0.5) as rig:
        rig.decode.work_s = 30.0
        assert (await answer_of(rig, PROMPT)).status == 504
        assert await rig.failures() == {"deadline": 1}


async def test_engines_are_told_how_long_the_transfer_may_take_and_not_the_answer() -> None:
    async with running_rig(first_byte_timeout_s=50.0) as rig:
        for body in (PROMPT, STREAM):
            await answer_of(rig, body)
        for seen in (*rig.decode.seen, *rig.prefill.seen):
            assert 40_000 < (seen.params or {})["deadline_ms"] <= 50_000


async def test_a_client_may_still_ask_for_less_in_all(rig: Rig) -> None:
    rig.decode.tokens, rig.decode.token_s = ["x"] * 600, 0.05
    client = await send(rig, STREAM, **{"x-request-timeout": "1"})
    answer = await client.receive()
    assert not answer.is_whole
    assert code_of(answer) == "deadline_passed"
    assert (rig.decode.seen[0].params or {})["deadline_ms"] <= 1000


def _request(body: object) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
