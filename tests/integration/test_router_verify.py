"""An operator's order to verify a revision: who may give it, what a real request proves, and what is said when not."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from fakes.answers import error_body, json_answer
from fakes.engine import FakeEngine
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.kube_rig import running_kube_rig
from fakes.reservations import SECRET
from fakes.router import PROMPT, Rig, orders, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.secret import make_secret
from pdcluster_protocol.verify import MAX_ORDER_BYTES, VERIFY_PATH, VerifyOrder
from pdcluster_router.requests.verifier import MAX_RUNNING

pytestmark = pytest.mark.anyio


def shown_for(body: bytes, ends_in_s: float = 60.0, secret: Any = SECRET) -> dict[str, str]:
    return {"authorization": f"Bearer {secret.mint_pass(body, int(time.time() + ends_in_s))}"}


async def start(rig: Rig, **order: Any) -> RawClient:
    """An order is on its way; its answer is the test's to read."""
    body = json.dumps(order).encode()
    client = await rig.internal()
    await client.send(request_bytes(VERIFY_PATH, body, shown_for(body)))
    return client


async def verify(rig: Rig, **order: Any) -> Message:
    client = await start(rig, **order)
    async with asyncio.timeout(PATIENCE_S):
        return await client.receive()


def error_of(answer: Message) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status, error["code"], error["message"]


def prompts(*engines: FakeEngine) -> list[str]:
    return [seen.body["prompt"] for engine in engines for seen in engine.seen]


# Who may ask, and how.


async def test_without_a_pass_nothing_is_done(rig: Rig) -> None:
    body = b"{}"
    strangers = make_secret("the secret of somebody else")
    for headers in (
        {},
        {"authorization": "Basic " + SECRET.mint_pass(body, int(time.time()) + 60)},
        shown_for(b'{"timeout_s":2}'),
        shown_for(body, secret=strangers),
        shown_for(body, ends_in_s=-1),
        shown_for(body, ends_in_s=3600),
    ):
        answer = await (await rig.internal()).post(VERIFY_PATH, body, headers)
        assert error_of(answer)[:2] == (401, "bad_pass")
    assert rig.decode.seen == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"a":1}', b'{"timeout_s":0}', b'{"timeout_s":121}', b'{"revision":1}']
)
async def test_what_is_no_order_is_a_400(rig: Rig, body: bytes) -> None:
    answer = await (await rig.internal()).post(VERIFY_PATH, body, shown_for(body))
    assert error_of(answer)[:2] == (400, "invalid_order")


async def test_a_body_that_is_too_large_is_not_read_to_its_end(rig: Rig) -> None:
    answer = await (await rig.internal()).post(VERIFY_PATH, b"x" * (MAX_ORDER_BYTES + 1))
    assert error_of(answer)[:2] == (413, "body_too_large")


async def test_only_post_is_answered(rig: Rig) -> None:
    assert (await (await rig.internal()).get(VERIFY_PATH)).status == 405


# What is proven.


async def test_a_pair_that_hands_kv_over_is_verified(rig: Rig) -> None:
    answer = await verify(rig)
    told = answer.json()
    assert (answer.status, told.pop("seconds") > 0) == (200, True)
    assert told == {
        "verified": True,
        "revision": "",
        "prefill": {"name": "prefill-0", "pod": ""},
        "decode": {"name": "decode-0", "pod": ""},
        "prompt_tokens": 42,
        "pushed_tokens": 26,
        "block_tokens": 16,
        "is_content_compared": True,
        "transfer_protocol": "tcp",
    }
    (seen,) = rig.decode.seen
    assert (seen.body["max_tokens"], seen.body["ignore_eos"]) == (2, True)
    assert seen.message.headers["x-request-id"].startswith("verify-")


async def test_no_prompt_is_like_another_so_no_cache_can_answer(rig: Rig) -> None:
    for _ in range(3):
        assert (await verify(rig)).status == 200
    asked = prompts(rig.decode)
    assert len({prompt[:11] for prompt in asked}) == 3
    assert prompts(rig.prefill) == asked


async def test_clients_are_never_asked_for_receipts(rig: Rig) -> None:
    assert (await (await send(rig)).receive()).json()["kv_transfer_params"] is None
    (seen,) = rig.decode.seen
    assert "wants_receipt" not in (seen.params or {})


async def test_a_push_that_ends_before_prefills_own_answer_is_proof_once_that_has_come(rig: Rig) -> None:
    rig.decode.fault = Fault.GO_ON_AFTER_PUSH
    rig.prefill.close_gate(Gate.REPLY)
    client = await start(rig)
    await until(lambda: bool(rig.decode.seen) and rig.decode.seen[0].num_received > 0)
    await asyncio.sleep(0.05)
    rig.prefill.open_gate(Gate.REPLY)
    assert (await client.receive()).status == 200


# What is not.


@pytest.mark.parametrize(
    ("role", "fault", "why"),
    [
        ("decode", Fault.CACHED, "decode answered alone, it sent this router no reservation"),
        ("decode", Fault.RECOMPUTE, "prefill-0 answered 500"),
        ("decode", Fault.ERROR_500, "500: engine says no; decode had sent this router no reservation"),
        ("decode", Fault.ERROR_404, "404: The model `x` does not exist."),
        ("decode", Fault.DIE, "decode-0 did not answer to the end"),
        ("decode", Fault.EMPTY_200, "an empty body"),
        ("prefill", Fault.ERROR_500, "prefill-0 answered 500"),
        ("prefill", Fault.DIE, "the prompt could not be prefilled: prefill-0"),
    ],
)
async def test_what_proves_nothing_is_told_with_the_pair_and_tried_once(role: str, fault: Fault, why: str) -> None:
    async with running_rig(num_prefill=2, num_decode=2) as rig:
        for engine in rig.decodes if role == "decode" else rig.prefills:
            engine.fault = fault
        if fault is Fault.RECOMPUTE:
            rig.prefill.fault = rig.prefills[1].fault = Fault.ERROR_500
        status, code, message = error_of(await verify(rig))
        assert (status, code) == (409, "not_verified")
        assert message.startswith("prefill-0 and decode-0: ")
        assert why in message
        assert (len(rig.decodes[0].seen), len(rig.decodes[1].seen), len(orders(rig)) <= 1) == (1, 0, True)


async def test_a_decode_that_says_the_kv_was_lost_is_not_asked_to_compute_it(rig: Rig) -> None:
    rig.decode.fault, rig.decode.num_losses = Fault.RECOMPUTE, 1
    status, _, message = error_of(await verify(rig))
    assert (status, "a lease has lapsed" in message) == (409, True)
    (seen,) = rig.decode.seen
    assert seen.outcome is not None
    assert (seen.outcome_status, seen.outcome["action"]) == (200, "fail")


async def test_tokens_whose_content_decode_did_not_compare_are_no_proof(rig: Rig) -> None:
    rig.decode.compares_content = False
    assert "did not compare them with what prefill pushed" in error_of(await verify(rig))[2]


async def test_an_answer_without_a_receipt_is_no_proof(rig: Rig) -> None:
    rig.decode.gives_receipts = False
    assert "no receipt" in error_of(await verify(rig))[2]


async def test_where_engines_are_is_told_nobody(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.decode.fault = Fault.RAW
    rig.decode.raw = json_answer(500, error_body("no way to http://10.1.2.3:8100/x", 500))
    told = error_of(await verify(rig))[2]
    assert "no way to <address>" in told
    assert "not verified" in caplog.text
    assert "10.1.2.3" not in told + caplog.text


async def test_one_that_is_cancelled_is_over_at_the_engines_too(rig: Rig) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    verifying = asyncio.create_task(rig.router.verifier.verify(VerifyOrder()))
    await rig.prefill.next_request()
    verifying.cancel()
    await asyncio.wait({verifying})
    assert not rig.router.services.running


async def test_the_time_for_it_is_kept(rig: Rig) -> None:
    rig.decode.fault = Fault.HANG
    began_at = time.monotonic()
    status, _, message = error_of(await verify(rig, timeout_s=1))
    assert 0.9 < time.monotonic() - began_at < 20
    assert (status, "504: no complete answer within" in message) == (409, True)


async def test_an_engine_that_cannot_be_reached_is_named(rig: Rig) -> None:
    await rig.decode.stop()
    status, _, message = error_of(await verify(rig))
    assert (status, "no decode engine can be reached: decode-0" in message) == (409, True)
    await rig.decode.start()


# How much of it there may be.


async def test_only_so_many_run_at_a_time(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    clients = [await start(rig) for _ in range(MAX_RUNNING)]
    await until(lambda: len(rig.decode.seen) == MAX_RUNNING)
    refused = await verify(rig)
    assert error_of(refused)[:2] == (429, "too_many_verifications")
    assert refused.headers["retry-after"]
    rig.decode.open_gate(Gate.RESERVE)
    assert [(await client.receive()).status for client in clients] == [200] * MAX_RUNNING
    assert (await verify(rig)).status == 200


async def test_a_full_queue_does_not_look_like_a_broken_pool() -> None:
    async with running_rig(max_prefill_backlog_tokens=1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await send(rig) for _ in range(2)]
        await until(lambda: rig.router.services.num_queued == 1)
        verifying = await start(rig)
        await until(lambda: len(rig.prefill.seen) == 2)
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await verifying.receive()).status == 200
        assert [(await client.receive()).status for client in clients] == [200, 200]


async def test_a_router_that_stops_verifies_nothing(rig: Rig) -> None:
    client = await rig.internal()
    assert (await client.get("/health")).status == 200
    rig.router.drain()
    body = b"{}"
    assert error_of(await client.post(VERIFY_PATH, body, shown_for(body)))[:2] == (503, "draining")


async def test_a_verification_that_the_routers_own_end_stops_says_nothing_of_kv(rig: Rig) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    client = await start(rig)
    await rig.prefill.next_request()
    rig.router.drain()
    await rig.router.wait_until_idle(0)
    assert error_of(await client.receive())[:2] == (503, "draining")


async def test_a_verification_counts_as_a_request(rig: Rig) -> None:
    await verify(rig)
    assert await rig.metric('pdcluster_router_requests_total{outcome="ok"}') == 1
    assert (await (await rig.client()).post("/v1/completions", PROMPT)).status == 200


# Which engines.


async def test_a_revision_is_verified_by_its_own_engines_also_while_it_gets_no_requests() -> None:
    async with running_kube_rig() as rig:
        prefill, decode = await rig.start("prefill", "r2"), await rig.start("decode", "r2")
        await rig.usable(prefill, decode)
        answer = await verify(rig, revision="r2")
        assert answer.json()["prefill"] == {"name": "prefill-1", "pod": "pod-uid-s2"}
        assert answer.json()["decode"] == {"name": "decode-1", "pod": "pod-uid-s3"}
        assert (len(prefill.seen), len(decode.seen), orders(rig)) == (1, 1, prefill.seen)


async def test_the_pods_that_are_named_are_the_ones_that_are_asked() -> None:
    async with running_kube_rig(pairs=3) as rig:
        for _ in range(2):
            answer = await verify(rig, revision="r1", prefill_pods=["other", "pod-uid-s4"], decode_pods=["pod-uid-s3"])
            told = answer.json()
            assert (told["prefill"]["pod"], told["decode"]["pod"]) == ("pod-uid-s4", "pod-uid-s3")


async def test_one_after_the_other_they_go_through_all_engines() -> None:
    async with running_kube_rig(pairs=3) as rig:
        for _ in range(3):
            assert (await verify(rig, revision="r1")).status == 200
        assert [len(engine.seen) for engine in (*rig.prefills, *rig.decodes)] == [1] * 6


async def test_what_is_missing_is_told() -> None:
    async with running_kube_rig() as rig:
        alone = await rig.start("decode", "r2", ready=False)
        await rig.becomes(alone, "starting")
        missing = await verify(rig, revision="r2")
        assert error_of(missing) == (
            503,
            "nothing_to_verify",
            "no prefill engine of revision 'r2' is ready and answers its /health: this router knows 0 of them; "
            "no decode engine of revision 'r2' is ready and answers its /health: decode-1 (pod-uid-s2) is starting",
        )
        assert missing.headers["retry-after"]
        await rig.usable(await rig.start("prefill", "r2"))
        assert error_of(await verify(rig, revision="r2"))[2].startswith("no decode engine of revision 'r2'")
        unnamed = await verify(rig, revision="r1", decode_pods=["pod-x"])
        assert error_of(unnamed)[2].endswith(": this router knows 1 of them, none of the pods asked for")
        assert alone.seen == []
