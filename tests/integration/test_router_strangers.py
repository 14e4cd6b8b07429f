"""The metaserver believes only a sealed call with this router's token for this transfer, while the transfer lives."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from typing import Any

import pytest

from fakes.faults import Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.reservations import SECRET, reservation_call, reservation_of
from fakes.router import COMPLETIONS, PROMPT, Rig, params_of, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_connector.metaserver_client import MetaserverClient
from pdcluster_protocol.ids import Attempt, RequestId, TransferId
from pdcluster_protocol.metaserver import SEAL_HEADER, PrefillOutcome
from pdcluster_protocol.params import parse_reservation
from pdcluster_protocol.secret import make_secret

pytestmark = pytest.mark.anyio


async def running_request(rig: Rig) -> tuple[RawClient, dict[str, Any]]:
    """A request that decode has and has not reserved for, and its parameters."""
    rig.decode.close_gate(Gate.RESERVE)
    client = await send(rig)
    params = (await rig.decode.next_request()).params
    assert params is not None
    return client, params


async def call(rig: Rig, params: dict[str, Any], **changes: Any) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await rig.reserve(reservation_of(params, **changes))


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
async def test_a_call_without_the_right_token_is_a_403_and_changes_nothing(rig: Rig, how: str) -> None:
    client, params = await running_request(rig)
    answer = await call(rig, forged(params, how))
    assert (answer.status, answer.json()["status"]) == (403, "failed")
    assert rig.prefill.seen == []
    assert await rig.failures() == {"bad_token": 1}
    rig.decode.open_gate(Gate.RESERVE)
    assert (await client.receive()).status == 200


def stolen(params: dict[str, Any], how: str) -> bytes:
    """A call of somebody who has read decode's parameters and wants the KV pushed elsewhere."""
    ours, moved = (json.dumps(reservation_of(params, remote_host=host)).encode() for host in ("127.0.0.1", "127.6.6.6"))
    seals = {
        "none": {},
        "empty": {SEAL_HEADER: ""},
        "its own": {SEAL_HEADER: make_secret("of another cluster").seal_call(moved)},
        "that of decode's call": {SEAL_HEADER: SECRET.seal_call(ours)},
        "the token": {SEAL_HEADER: params["token"]},
        "not ascii": {SEAL_HEADER: "\u00e9" * 32},
        "long": {SEAL_HEADER: "0" * 30_000},
        "dropped by the connection": {SEAL_HEADER: SECRET.seal_call(moved), "connection": SEAL_HEADER},
    }
    return request_bytes("/v1/metaserver", moved, seals[how])


@pytest.mark.parametrize(
    "how",
    [
        "none",
        "empty",
        "its own",
        "that of decode's call",
        "the token",
        "not ascii",
        "long",
        "dropped by the connection",
    ],
)
async def test_a_reservation_that_decode_did_not_seal_is_a_403_and_decodes_own_is_taken_after_it(
    rig: Rig, how: str
) -> None:
    client, params = await running_request(rig)
    stranger = await rig.internal()
    async with asyncio.timeout(PATIENCE_S):
        await stranger.send(stolen(params, how))
        answer = await stranger.receive()
    assert (answer.status, answer.json()["status"]) == (403, "failed")
    assert rig.prefill.seen == []
    assert await rig.failures() == {"bad_token": 1}
    rig.decode.open_gate(Gate.RESERVE)
    assert (await client.receive()).status == 200
    assert [(seen.params or {})["remote_host"] for seen in rig.prefill.seen] == ["127.0.0.1"]


async def test_the_connectors_own_call_is_taken(rig: Rig) -> None:
    client, params = await running_request(rig)
    outcomes: deque[tuple[RequestId, PrefillOutcome]] = deque()
    connector = MetaserverClient(outcomes, SECRET)
    try:
        reservation, deadline = parse_reservation(reservation_of(params)), time.monotonic() + PATIENCE_S
        connector.post(RequestId("r"), params["metaserver"], reservation, deadline=deadline)
        await until(lambda: bool(outcomes))
    finally:
        connector.close()
    assert [outcome.is_ok for _, outcome in outcomes] == [True]
    client.leave()


async def test_one_changed_byte_of_decodes_own_call_is_a_403(rig: Rig) -> None:
    client, params = await running_request(rig)
    stranger = await rig.internal()
    sealed = reservation_call(reservation_of(params))
    await stranger.send(sealed.replace(b'"remote_block_ids": [[3, ', b'"remote_block_ids": [[2, '))
    assert (await stranger.receive()).status == 403
    await stranger.send(sealed)
    assert (await stranger.receive()).json()["status"] == "ok"
    client.leave()


async def test_a_token_that_is_replayed_after_the_end_meets_no_transfer(rig: Rig) -> None:
    client, params = await running_request(rig)
    rig.decode.open_gate(Gate.RESERVE)
    assert (await client.receive()).status == 200
    await rig.settled()
    assert (await call(rig, params)).status == 404
    assert await rig.failures() == {"reservation_refused": 1}
    assert len(rig.prefill.seen) == 1


async def test_a_valid_token_of_another_router_process_meets_no_transfer(rig: Rig) -> None:
    assert (await call(rig, params_of("of-another-process"))).status == 404


@pytest.mark.parametrize("attempt", [2, 7])
async def test_prefills_token_of_a_later_attempt_is_no_reservation_of_decodes(rig: Rig, attempt: int) -> None:
    client, params = await running_request(rig)
    answer = await call(rig, {**params_of(params["transfer_id"], attempt), "attempt": attempt})
    assert answer.json()["reason"] == f"attempt {attempt} of this transfer is not running"
    assert rig.prefill.seen == []
    client.leave()


async def test_two_requests_never_share_a_token_or_an_id(rig: Rig) -> None:
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
async def test_unknown_versions_and_fields_are_refused_by_name(rig: Rig, changes: dict[str, Any], named: str) -> None:
    answer = await call(rig, params_of(), **changes)
    assert answer.status == 400
    assert named in answer.json()["reason"]
