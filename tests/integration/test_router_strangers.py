"""The metaserver believes only who has this router's token for this transfer, and only while the transfer lives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fakes.engine import Gate, reservation_of
from fakes.http import Message, RawClient, request_bytes
from fakes.router import COMPLETIONS, SECRET, Rig, params_of, running_rig
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.secret import make_secret

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "once upon a time"}


async def running_request(rig: Rig) -> tuple[RawClient, dict[str, Any]]:
    """A request that decode has and has not reserved for, and its parameters."""
    rig.decode.close_gate(Gate.RESERVE)
    client = await rig.client()
    await client.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode()))
    params = (await rig.decode.next_request()).params
    assert params is not None
    return client, params


async def call(rig: Rig, params: dict[str, Any], **changes: Any) -> Message:
    async with asyncio.timeout(20):
        return await (await rig.client()).post("/v1/metaserver", reservation_of(params, **changes))


def forged(params: dict[str, Any], how: str) -> dict[str, Any]:
    transfer_id, deadline_ms = TransferId(params["transfer_id"]), params["deadline_ms"]
    tokens = {
        "no token": "",
        "no token at all": "x",
        "another cluster": make_secret("of another cluster").mint(transfer_id, Attempt(1), deadline_ms),
        "another transfer": SECRET.mint(TransferId("t"), Attempt(1), deadline_ms),
        "another attempt": SECRET.mint(transfer_id, Attempt(2), deadline_ms),
        "another deadline": "9" + params["token"],
        "cut": params["token"][:-1],
        "long": params["token"] + "0" * 100_000,
        "not ascii": params["token"] + "\u00e9",
    }
    return {**params, "token": tokens[how]}


@pytest.mark.parametrize(
    "how",
    [
        "no token",
        "no token at all",
        "another cluster",
        "another transfer",
        "another attempt",
        "another deadline",
        "cut",
        "long",
        "not ascii",
    ],
)
async def test_a_call_without_the_right_token_is_a_403_and_changes_nothing(how: str) -> None:
    async with running_rig() as rig:
        client, params = await running_request(rig)
        answer = await call(rig, forged(params, how))
        assert (answer.status, answer.json()["status"]) == (403, "failed")
        assert rig.prefill.seen == []
        assert await rig.failures() == {"bad_token": 1}
        rig.decode.open_gate(Gate.RESERVE)
        assert (await client.receive()).status == 200
        await rig.settled()


async def test_a_token_that_is_replayed_after_the_end_meets_no_transfer() -> None:
    async with running_rig() as rig:
        client, params = await running_request(rig)
        rig.decode.open_gate(Gate.RESERVE)
        assert (await client.receive()).status == 200
        await rig.settled()
        assert (await call(rig, params)).status == 404
        assert await rig.failures() == {"reservation_refused": 1}
        assert len(rig.prefill.seen) == 1


async def test_a_valid_token_of_another_router_process_meets_no_transfer() -> None:
    async with running_rig() as rig:
        assert (await call(rig, params_of("of-another-process"))).status == 404


@pytest.mark.parametrize("attempt", [2, 7])
async def test_prefills_token_of_a_later_attempt_is_no_reservation_of_decodes(attempt: int) -> None:
    async with running_rig() as rig:
        client, params = await running_request(rig)
        answer = await call(rig, {**params_of(params["transfer_id"], attempt), "attempt": attempt})
        assert answer.json()["reason"] == f"attempt {attempt} of this transfer is not running"
        assert rig.prefill.seen == []
        client.leave()
        await rig.settled()


async def test_two_requests_never_share_a_token_or_an_id() -> None:
    async with running_rig() as rig:
        client = await rig.client()
        for _ in range(3):
            await client.post(COMPLETIONS, PROMPT)
        seen = [seen.params or {} for seen in rig.decode.seen]
        assert len({params["token"] for params in seen}) == len({params["transfer_id"] for params in seen}) == 3


async def test_a_reservation_has_a_limit_of_its_own() -> None:
    async with running_rig(max_reservation_bytes=4096) as rig:
        large = await call(rig, params_of(), remote_block_ids=[[7] * 4000])
        assert (large.status, large.json()["error"]["code"]) == (413, "body_too_large")
        prompt = await (await rig.client()).post(COMPLETIONS, {"prompt": "x" * 10_000})
        assert prompt.status == 200


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"version": 2}, "version 2, ours is 1"), ({"colour": "red"}, "colour"), ({"attempt": "one"}, "attempt")],
)
async def test_unknown_versions_and_fields_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    async with running_rig() as rig:
        answer = await call(rig, params_of(), **changes)
        assert answer.status == 400
        assert named in answer.json()["reason"]
