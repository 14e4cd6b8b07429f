"""L1 to L11: rules of a standard, and rough edges."""

from __future__ import annotations

import asyncio
import json

from fakes.faults import Fault
from fakes.http import request_bytes
from fakes.router import COMPLETIONS, PROMPT
from integration.review.high import send_rows
from integration.review.medium import send_engine_rows
from integration.review.table import finding
from integration.router_scene import running_scene
from integration.wire_rows import post
from patience import PATIENCE_S


@finding("L1", sent="targets in absolute form, with escapes and fragments", must="serve them as the paths they name")
async def name_targets() -> None:
    await send_rows("L1")


@finding("L2", sent="bad chunks and transfer encodings that are none", must="answer 400 before the end")
async def frame_badly() -> None:
    await send_rows("L2")


@finding("L3", sent="no Host, two Hosts, unknown expectations, HTTP/0.9", must="answer 400, 400, 417, 400")
async def break_rules_of_heads() -> None:
    await send_rows("L3")


@finding("L4", sent="headers that Connection names, from both sides", must="pass none of them on")
async def name_headers_of_one_hop() -> None:
    await send_rows("L4")
    await send_engine_rows("L4")


@finding("L5", sent="request ids: none, good ones, long ones, two", must="give one back with each answer and error")
async def send_ids() -> None:
    await send_rows("L5")
    await send_engine_rows("L5")


BOM = b"\xef\xbb\xbf"
SEED = b'{"prompt":"hi","seed":%d,"tools":[{"x":100000000000000000000000}]}' % 2**70


@finding(
    "L6",
    sent="a byte order mark, numbers beyond 64 bits, JSON 200 and 100,000 levels deep",
    must="reach decode byte for byte; what is too deep is a 400",
)
async def send_odd_json() -> None:
    async with running_scene() as scene:
        for body in (BOM + b'{"prompt":"hi"}', SEED, b'{"prompt":"hi","x":%b}' % (b"[" * 200 + b"]" * 200)):
            assert (await scene.ask(body)).status == 200
            sent = body.removeprefix(BOM).removesuffix(b"}")
            assert scene.decode.seen[-1].message.body.removeprefix(BOM).startswith(sent)
        assert (await scene.ask(b'{"prompt":%b}' % (b"[" * 100_000 + b"]" * 100_000))).status == 400


@finding(
    "L7",
    sent="a streamed request in HTTP/1.0, whose stream breaks off",
    must="end with an error event and a reset: nothing else tells such a client that it is not whole",
)
async def break_off_in_http_1_0() -> None:
    async with running_scene() as scene:
        scene.decode.fault = Fault.DIE_MID_STREAM
        client = await scene.client()
        await client.send(post(body=b'{"prompt":"hi","stream":true}', version=b"HTTP/1.0"))
        came, is_reset = b"", False
        try:
            async with asyncio.timeout(PATIENCE_S):
                while part := await client.reader.read(1 << 16):
                    came += part
        except ConnectionResetError:
            is_reset = True
        assert (b'data: {"error"' in came, is_reset) == (True, True)


@finding(
    "L8",
    sent="from an engine: stream types in capitals, comments before errors, status 099, bytes behind an answer",
    must="find the error before the head is sent, answer 502 at once, keep the answer",
)
async def answer_oddly() -> None:
    await send_engine_rows("L8")


@finding(
    "L9",
    sent="transfer parameters within vllm_xargs, and kv_ and ec_transfer_params beside the prompt",
    must="answer 400 to the first; engines see ours and no others",
)
async def bring_transfer_parameters() -> None:
    async with running_scene() as scene:
        for key in ("kv_transfer_params", "ec_transfer_params"):
            for value in ("boo", {"do_remote_decode": True}):
                assert (await scene.ask({**PROMPT, "n": 2, "vllm_xargs": {key: value}})).status == 400
                assert (await scene.ask({**PROMPT, "n": 2, key: value})).status == 200
                assert scene.decode.seen[-1].body[key] is None
                assert (await scene.ask({**PROMPT, key: value})).status == 200
                assert (scene.decode.seen[-1].params or {})["transfer_id"]
        assert scene.prefill.seen[-1].body["ec_transfer_params"] is None


@finding(
    "L10",
    sent="a large body that comes steadily for longer than the limit, and one that stops",
    must="serve the first, answer 408 to the second",
)
async def upload_slowly() -> None:
    async with running_scene("--client-read-timeout=2") as scene:
        raw = request_bytes(COMPLETIONS, json.dumps({"prompt": "x" * 400_000}).encode())
        steady, stopping = await scene.client(), await scene.client()
        await steady.send(raw[:200_000])
        await stopping.send(raw[:1_000])
        await asyncio.sleep(2.5)
        await steady.send(raw[200_000:])
        async with asyncio.timeout(PATIENCE_S):
            assert (await steady.receive()).status == 200
            assert (await stopping.receive()).status == 408


@finding(
    "L11",
    sent="HEAD of the models, a bad body, and a browser's look at /docs on both ports",
    must="answer, with a date; the page loads nothing from elsewhere",
)
async def look_at_pages() -> None:
    await send_rows("L11")
    async with running_scene() as scene:
        for is_internal in (False, True):
            page = await scene.get("/docs", is_internal=is_internal)
            assert page.status == 200
            assert b"/health" in page.body
            assert not any(mark in page.body for mark in (b"//", b"<script", b"<link", b"<img"))
            assert (await scene.get("/redoc", is_internal=is_internal)).status == 404
