"""Each request has its turn once, and none after an answer that closes the connection."""

from __future__ import annotations

import asyncio
import json

import pytest

from fakes.answers import STREAM_HEAD, chunk
from fakes.faults import Fault, Gate
from fakes.http import RawClient, request_bytes
from fakes.router import COMPLETIONS, Rig, running_rig, until
from patience import PATIENCE_S
from pdcluster_router.core.apis.openai_errors import body_too_large
from pdcluster_router.front.server_protocol import RouterProtocol
from pdcluster_router.http.reading import SLICE_BYTES

pytestmark = pytest.mark.anyio

MB = 1 << 20


def post(prompt: str, *, stream: bool = False) -> bytes:
    return request_bytes(COMPLETIONS, json.dumps({"prompt": prompt, "stream": stream}).encode())


async def all_that_comes(client: RawClient) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await client.reader.read()


def prompts(rig: Rig) -> list[str]:
    return [seen.body["prompt"] for seen in rig.decode.seen]


async def running_first(rig: Rig) -> RawClient:
    """A client whose request waits for prefill, until that gate is opened."""
    rig.prefill.close_gate(Gate.PREFILL)
    client = await rig.client()
    await client.send(post("first"))
    await rig.decode.next_request()
    return client


async def test_a_request_that_is_whole_as_its_turn_comes_is_answered_once(rig: Rig) -> None:
    client = await running_first(rig)
    rig.feed(client, post("x" * (2 * SLICE_BYTES + 1000)))  # Held with a rest that is read as its turn comes.
    for _ in range(10):
        await asyncio.sleep(0)
    rig.prefill.open_gate(Gate.PREFILL)
    assert [(await client.receive()).status for _ in range(2)] == [200, 200]
    assert (await client.get("/health")).status == 200  # And not a third answer.
    assert len(rig.decode.seen) == 2


ANSWERS = {
    "with a length": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999999\r\n\r\n" + b"A" * 99,
    "in chunks": STREAM_HEAD + chunk(b"data: {}\n\n"),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_nothing_follows_an_answer_that_broke_off(kind: str) -> None:
    async with running_rig(client_linger_s=0.5) as rig:
        rig.decode.fault, rig.decode.raw = Fault.RAW, ANSWERS[kind]
        client = await rig.client()
        await client.send(post("first", stream=kind == "in chunks"))
        begun = await client.reader.readuntil(b"\r\n\r\n")
        rig.feed(client, post("second") + post("third")[:-5])
        rig.decode.fault = Fault.NONE
        rig.decode.hang_up_on_all()
        came = begun + await all_that_comes(client)
        assert came.count(b"HTTP/1.1 ") == 1, came
        assert prompts(rig) == ["first"]


async def test_nothing_follows_an_answer_that_says_close() -> None:
    async with running_rig(client_linger_s=0.5) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await rig.client()
        await client.send(request_bytes(COMPLETIONS, b'{"prompt":"first"}', {"connection": "close"}))
        await rig.decode.next_request()
        rig.feed(client, post("second") + post("third")[:-5])
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await all_that_comes(client)).count(b"HTTP/1.1 ") == 1
        assert prompts(rig) == ["first"]


@pytest.mark.parametrize("blank", [b"\r\n", b"\r\n\r\n", b"\n"])
async def test_blank_lines_behind_a_request_do_not_end_its_stream(rig: Rig, blank: bytes) -> None:
    # RFC 9112, 2.2: old clients send one behind a body.
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await rig.client()
    await client.send(post("first", stream=True))
    await client.reader.readuntil(b"\r\n\r\n")
    rig.change_settings(client_read_timeout_s=0.2)
    rig.feed(client, blank)
    await asyncio.sleep(0.5)
    rig.decode.open_gate(Gate.SECOND_TOKEN)
    rest = await client.reader.readuntil(b"0\r\n\r\n")
    assert b"[DONE]" in rest


@pytest.mark.parametrize("blank", [b"\r\n", b"\n", b"\r\n\r\n"])
async def test_blank_lines_before_the_first_request_are_skipped(rig: Rig, blank: bytes) -> None:
    client = await rig.client()
    await until(lambda: any(isinstance(one, RouterProtocol) for one in rig.server.server_state.connections))
    rig.feed(client, blank)
    await client.send(post("first"))
    assert (await client.receive()).status == 200


async def test_a_blank_line_takes_no_room_and_is_answered_by_nothing(rig: Rig) -> None:
    client = await running_first(rig)
    room = rig.router.room
    num_taken = room.max_bytes - room.used_bytes
    room.used_bytes += num_taken  # By others.
    rig.feed(client, b"\r\n")
    room.used_bytes -= num_taken
    rig.prefill.open_gate(Gate.PREFILL)
    assert (await client.receive()).status == 200
    assert (await client.get("/health")).status == 200


async def test_the_rest_of_a_refused_upload_is_read_so_that_the_client_sees_why() -> None:
    async with running_rig(max_body_bytes=MB, client_linger_s=60.0) as rig:
        client = await rig.client()
        async with asyncio.timeout(PATIENCE_S):
            await client.send(request_bytes(COMPLETIONS, b"x" * (32 * MB)))
            assert (await client.receive()).status == 413


async def test_a_refused_request_that_is_whole_as_its_turn_comes_is_told_why() -> None:
    async with running_rig(max_body_bytes=MB) as rig:
        client = await running_first(rig)
        rig.feed(client, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        incoming = rig.connection_of(client)._incoming
        assert incoming is not None
        incoming.refusal = body_too_large(MB)
        rig.prefill.open_gate(Gate.PREFILL)
        connection = rig.connection_of(client)
        while connection._active is not incoming:
            await asyncio.sleep(0)
        connection.data_received(b"1\r\nx\r\n0\r\n\r\n")
        assert [(await client.receive()).status for _ in range(2)] == [200, 413]


async def test_blank_lines_alone_keep_no_connection(rig: Rig) -> None:
    client = await rig.served_client()
    rig.change_settings(client_read_timeout_s=0.2)
    await client.send(b"\r\n")
    assert await all_that_comes(client) == b""
    await until(lambda: not rig.server.server_state.connections)
