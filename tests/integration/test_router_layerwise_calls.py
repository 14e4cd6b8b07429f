"""Who may reserve where vllm-ascend's own connector calls, without a token; and what cannot be proven there."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from fakes.faults import Gate
from fakes.http import Message, request_bytes
from fakes.layerwise import LayerwiseRig, posted, request_id_of, running_layerwise_rig
from fakes.reservations import SECRET
from fakes.router import PROMPT, running_rig, send
from patience import PATIENCE_S
from pdcluster_protocol.metaserver import METASERVER_PATH

pytestmark = pytest.mark.anyio


async def reserve(rig: LayerwiseRig, call: object) -> Message:
    body = call if isinstance(call, bytes) else json.dumps(call).encode()
    client = await rig.internal()
    await client.send(request_bytes(METASERVER_PATH, body))
    async with asyncio.timeout(PATIENCE_S):
        return await client.receive()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"request_id": "cmpl-" + "0" * 32 + "-0"}, 404),
        ({"request_id": "chatcmpl-" + "0" * 32}, 404),
        ({"request_id": "cmpl-1"}, 400),
        ({"request_id": "cmpl-" + "0" * 32 + "-1"}, 400),
        ({"request_id": 7}, 400),
    ],
)
async def test_a_call_of_no_transfer_is_refused(change: dict[str, Any], status: int) -> None:
    async with running_layerwise_rig() as rig:
        answer = await reserve(rig, {**posted("x"), **change})
        assert (answer.status, answer.json()["status"]) == (status, "failed")


@pytest.mark.parametrize("body", [b"", b"nope", b"[]", b"{}"])
async def test_what_is_no_reservation_is_refused(body: bytes) -> None:
    async with running_layerwise_rig() as rig:
        assert (await reserve(rig, body)).status == 400


async def test_a_second_call_of_a_transfer_cannot_lead_its_kv_elsewhere() -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, PROMPT)
        await rig.prefill.next_request()
        call = {**posted(request_id_of(rig.decode.seen[0])), "remote_host": "10.6.6.6"}
        assert (await reserve(rig, call)).json()["status"] == "failed"
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200
        assert [seen.params for seen in rig.prefill.seen] == rig.decode.posts
        await rig.settled()


async def test_engines_of_our_dialect_are_not_taken_for_theirs() -> None:
    async with running_rig() as rig:
        answer = await rig.reserve(posted("cmpl-" + "0" * 32 + "-0"))
        assert (answer.status, answer.json()["status"]) == (400, "failed")


async def test_nothing_can_be_verified_where_engines_write_no_receipt() -> None:
    order = json.dumps({"revision": "", "timeout_s": 5}).encode()
    async with running_layerwise_rig() as rig:
        shown = {"authorization": f"Bearer {SECRET.mint_pass(order, int(time.time()) + 60)}"}
        answer = await (await rig.internal()).post("/pdcluster/verify", order, shown)
        assert (answer.status, answer.json()["error"]["code"]) == (501, "not_verifiable")
        assert rig.decode.seen == rig.prefill.seen == []


async def test_a_request_whose_call_is_refused_ends_at_once_since_decode_reads_no_answer() -> None:
    async with running_layerwise_rig() as rig:
        rig.decode.close_gate(Gate.RESERVE)
        client = await send(rig, PROMPT)
        seen = await rig.decode.next_request()
        refused = await reserve(rig, {**posted(request_id_of(seen)), "remote_block_ids": "none"})
        assert refused.status == 400
        async with asyncio.timeout(PATIENCE_S):
            answer = await client.receive()
        assert (answer.status, answer.json()["error"]["code"]) == (502, "prefill_failed")
        rig.decode.open_gate(Gate.RESERVE)
        await rig.settled()
