"""Clients that leave, read slowly, or come in crowds; and the openai SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI, InternalServerError, NotFoundError
from openai.types.chat import ChatCompletionMessageParam

from fakes.engine import Seen
from fakes.faults import Fault, Gate
from fakes.reservations import reservation_call, reservation_of
from fakes.router import COMPLETIONS, PROMPT, STREAM, Rig, raw, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role

pytestmark = pytest.mark.anyio

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def assert_aborted(seen: Seen) -> None:
    await asyncio.wait_for(seen.ended.wait(), PATIENCE_S)
    assert seen.is_disconnected


# Leaving. Each test stops the request at one step, and hangs up there.


async def test_a_client_that_leaves_before_its_request_is_whole_leaves_nothing(rig: Rig) -> None:
    client = await rig.client()
    await client.send(raw(PROMPT)[:-5])
    await until(lambda: len(rig.server.server_state.connections) == 1)
    client.leave()
    await until(lambda: not rig.server.server_state.connections)
    assert rig.decode.seen == []


@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["plain", "stream"])
async def test_a_client_that_leaves_before_the_reservation_aborts_decode(rig: Rig, body: dict[str, object]) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    client = await send(rig, body)
    seen = await rig.decode.next_request()
    client.leave()
    await assert_aborted(seen)
    await rig.settled()
    assert await rig.metric('pdcluster_router_requests_total{outcome="client_gone"}') == 1


@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["plain", "stream"])
async def test_a_client_that_leaves_during_prefill_stops_the_writer_and_decode(
    rig: Rig, body: dict[str, object]
) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig, body)
    order = await rig.prefill.next_request()
    client.leave()
    await assert_aborted(order)
    await rig.decode.seen[0].ended.wait()


async def test_a_client_that_leaves_during_prefill_fails_the_open_metaserver_call(rig: Rig) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    client, metaserver = await rig.client(), await rig.internal()
    await client.send(raw(PROMPT))
    await rig.prefill.next_request()
    reservation = reservation_of(rig.decode.seen[0].params or {})
    await until(lambda: len(rig.server.server_state.connections) >= 3)
    rig.feed(metaserver, reservation_call(reservation))
    client.leave()
    outcome = (await metaserver.receive()).json()
    assert (outcome["status"], outcome["reason"]) == ("failed", "the client has left")


async def test_a_client_that_leaves_mid_stream_aborts_decode(rig: Rig) -> None:
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await send(rig, STREAM)
    await client.reader.readuntil(b"Hello")
    client.leave()
    await assert_aborted(rig.decode.seen[0])


async def test_a_client_that_leaves_while_a_connection_is_being_made_leaves_nothing(rig: Rig) -> None:
    before = len(asyncio.all_tasks())
    clients = [await rig.client() for _ in range(20)]
    for client in clients:
        await client.send(raw(STREAM))
        client.leave()
    await until(lambda: not rig.server.server_state.connections)
    await rig.settled()
    await until(lambda: all(seen.ended.is_set() for seen in rig.decode.seen))
    await until(
        lambda: len(asyncio.all_tasks()) <= before + len(rig.decode._connections) + len(rig.prefill._connections)
    )


async def test_a_client_that_leaves_after_its_answer_does_not_stop_a_trailing_prefill(rig: Rig) -> None:
    rig.prefill.close_gate(Gate.REPLY)
    rig.decode.fault = Fault.GO_ON_AFTER_PUSH
    client = await rig.client()
    assert (await client.post(COMPLETIONS, PROMPT)).status == 200
    client.leave()
    order = rig.prefill.seen[0]
    assert not order.ended.is_set()
    rig.prefill.open_gate(Gate.REPLY)
    await order.ended.wait()
    assert not order.is_disconnected


# Slow and many.


async def test_a_slow_client_stops_the_reading_from_decode_and_gets_every_byte(rig: Rig) -> None:
    rig.decode.tokens = ["x"] * 400
    rig.decode.padding = "y" * 50_000
    client = await send(rig, STREAM)
    await client.reader.readuntil(b"x")
    # The client now reads nothing: what decode can write is bounded by buffers, not by the answer.
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport for both ways
    (connection,) = rig.router.services.engines[Role.DECODE][0].pool._all
    await until(lambda: connection._is_paused)
    assert not rig.decode.seen[0].ended.is_set()
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
    rest = await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), PATIENCE_S)
    assert rest.count(b"data: ") == 400 + 1


async def test_500_streams_at_once(rig: Rig) -> None:

    async def one() -> bytes:
        client = await rig.client()
        answer = await client.post(COMPLETIONS, STREAM)
        client.leave()
        assert answer.is_whole
        return answer.body

    async with asyncio.timeout(PATIENCE_S):
        bodies = await asyncio.gather(*(one() for _ in range(500)))
    assert set(bodies) == {b"".join(rig.decode.events(rig.decode.seen[0]))}
    await rig.settled()
    assert await rig.metric('pdcluster_router_requests_total{outcome="ok"}') == 500


# The openai SDK.


@asynccontextmanager
async def sdk() -> AsyncIterator[tuple[Rig, AsyncOpenAI]]:
    async with (
        running_rig() as rig,
        AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield rig, client


async def test_the_openai_sdk_gets_tools_and_logprobs_through() -> None:
    async with sdk() as (rig, client):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        answer = await client.chat.completions.create(  # type: ignore[call-overload]
            model="m", messages=MESSAGES, tools=tools, tool_choice="required", logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "f"
        assert answer.choices[0].logprobs.content[0].logprob == -0.5
        for body in (rig.decode.seen[0].body, rig.prefill.seen[0].body):
            assert body["tools"] == tools
        assert rig.decode.seen[0].body["top_logprobs"] == 2
        assert (rig.prefill.seen[0].body["logprobs"], rig.prefill.seen[0].body["top_logprobs"]) == (None, 0)


async def test_the_openai_sdk_knows_our_errors() -> None:
    async with sdk() as (rig, client):
        rig.decode.fault = Fault.ERROR_404
        with pytest.raises(NotFoundError, match="does not exist"):
            await client.completions.create(model="x", prompt="a")
        await rig.decode.stop()
        with pytest.raises(InternalServerError) as caught:
            await client.completions.create(model="m", prompt="a")
        assert caught.value.status_code == 503
        assert caught.value.code == "no_decode_engine"
