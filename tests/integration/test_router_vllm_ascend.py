"""Engines with vllm-ascend's own connector behind our router: each request ends with an answer or one clear error.

The engines are fakes made from reading their connector (``fakes/layerwise.py``): decode never looks at the metaserver's
answer, so that only the router can end what it waits for.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from fakes.engine import Seen
from fakes.faults import Fault, Gate
from fakes.http import Message
from fakes.layerwise import LayerwiseRig, request_id_of, running_layerwise_rig
from fakes.router import CHAT, COMPLETIONS, PROMPT, orders, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role

pytestmark = pytest.mark.anyio

STREAM = {**PROMPT, "stream": True}
BOTH = pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["plain", "stream"])
ASKED_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}


async def post(
    rig: LayerwiseRig, body: object, path: str = COMPLETIONS, headers: dict[str, str] | None = None
) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await rig.client()).post(path, body, headers)


def error_of(answer: Message) -> tuple[int, str, str]:
    """Status, code and message of the one error that a client gets."""
    assert answer.is_whole
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status, error["code"], error["message"]


async def let_go(seen: Seen) -> bool:
    """The engine has seen that nobody waits for its answer."""
    async with asyncio.timeout(PATIENCE_S):
        await seen.ended.wait()
    return seen.is_disconnected


# All is well.


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        (COMPLETIONS, PROMPT, r"cmpl-[0-9a-f]{32}-0"),
        (COMPLETIONS, STREAM, r"cmpl-[0-9a-f]{32}-0"),
        (CHAT, ASKED_CHAT, r"chatcmpl-[0-9a-f]{32}"),
    ],
)
async def test_decode_is_asked_first_and_prefill_gets_exactly_what_decode_posted(
    path: str, body: dict[str, Any], form: str
) -> None:
    async with running_layerwise_rig() as rig:
        answer = await post(rig, body, path, {"x-request-id": "mine"})
        assert (answer.status, answer.is_whole) == (200, True)
        (asked,), (order,) = rig.decode.seen, rig.prefill.seen
        assert asked.body == {**body, "kv_transfer_params": asked.params}
        assert asked.params == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "metaserver": f"{rig.internal_url}/v1/metaserver",
        }
        assert order.params == rig.decode.posts[0]
        assert re.fullmatch(form, rig.decode.posts[0]["request_id"])
        assert request_id_of(order) == request_id_of(asked) == rig.decode.posts[0]["request_id"]
        ones = {"stream": False, "max_tokens": 1, "min_tokens": 1}
        assert {key: order.body[key] for key in ones} == ones
        assert order.body.get("max_completion_tokens", 1) == 1
        assert order.body.get("prompt") == body.get("prompt")
        assert order.body.get("messages") == body.get("messages")
        await rig.settled()


async def test_the_metaserver_answers_only_when_prefill_has_ended() -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.close_gate(Gate.REPLY)
        client = await send(rig, PROMPT)
        assert (await client.receive()).status == 200  # Decode has its KV already.
        assert rig.decode.replies == []
        rig.prefill.open_gate(Gate.REPLY)
        await until(lambda: bool(rig.decode.replies))
        assert (rig.decode.replies[0].status, rig.decode.replies[0].json()["status"]) == (200, "ok")
        await rig.settled()


async def test_the_load_of_engines_is_counted_by_the_blocks_that_decode_has_reserved() -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, PROMPT)
        await rig.prefill.next_request()
        tokens = [engine.load.outstanding_tokens for engine in rig.router.services.all_engines()]
        assert tokens[0] == 48
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200
        await rig.settled()


@pytest.mark.parametrize("said", [{"best_of": 2}, {"echo": True}, {"prompt_logprobs": 1}])
async def test_what_needs_a_whole_or_facts_of_the_prompt_is_computed_by_decode(said: dict[str, Any]) -> None:
    async with running_layerwise_rig() as rig:
        assert (await post(rig, {**PROMPT, **said})).status == 200
        assert rig.decode.seen[0].params is None
        assert (rig.decode.posts, rig.prefill.seen) == ([], [])
        await rig.settled()


async def test_a_prompt_that_decode_has_whole_is_not_prefilled() -> None:
    async with running_layerwise_rig() as rig:
        rig.decode.fault = Fault.CACHED
        assert (await post(rig, PROMPT)).status == 200
        await until(lambda: bool(rig.decode.replies))
        assert rig.prefill.seen == []
        await rig.settled()


async def test_a_reservation_that_is_posted_again_is_the_same_one() -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        rig.decode.num_broken_posts = 2
        client = await send(rig, PROMPT)
        await rig.prefill.next_request()
        await until(lambda: not rig.decode.num_broken_posts)
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200
        assert len(rig.prefill.seen) == 1
        await rig.settled()


# Prefill fails.


@BOTH
@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.ERROR_503, Fault.ERROR_404, Fault.DIE, Fault.GIVE_UP])
async def test_a_prefill_that_fails_ends_decode_and_the_client_gets_one_error(
    fault: Fault, body: dict[str, Any]
) -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.fault = fault
        status, code, message = error_of(await post(rig, body))
        assert (status, code) == (502, "prefill_failed")
        assert "prefill-0" in message
        (asked,) = rig.decode.seen  # A second try would cost decode more blocks, and find no engine.
        assert await let_go(asked)
        await rig.settled()


@BOTH
async def test_the_whole_request_goes_to_another_prefill_engine_with_other_blocks(body: dict[str, Any]) -> None:
    async with running_layerwise_rig(num_prefill=2) as rig:
        rig.prefills[0].fault = Fault.ERROR_500
        answer = await post(rig, body)
        assert (answer.status, answer.is_whole) == (200, True)
        first, second = orders(rig)
        assert (first.params or {})["request_id"] != (second.params or {})["request_id"]
        assert [await let_go(seen) for seen in rig.decode.seen] == [True, False]
        await rig.settled()


async def test_ranks_of_two_prefill_engines_together_are_never_taken_for_a_whole_prompt() -> None:
    async with running_layerwise_rig(num_prefill=2) as rig:
        rig.prefills[0].num_dead_after = 1
        assert (await post(rig, PROMPT)).status == 200
        assert len(orders(rig)) == 2
        await rig.settled()


async def test_an_order_that_reached_no_engine_is_given_to_another_one_with_the_same_reservation() -> None:
    async with running_layerwise_rig(num_prefill=2) as rig:
        await rig.prefills[0].stop()
        for _ in range(2):
            assert (await post(rig, PROMPT)).status == 200
        assert len(rig.decode.seen) == len(rig.decode.posts) == len(rig.prefills[1].seen) == 2
        await rig.settled()


async def test_how_often_a_request_is_sent_again_is_bounded() -> None:
    async with running_layerwise_rig(num_prefill=4, max_decode_attempts=2) as rig:
        for engine in rig.prefills:
            engine.fault = Fault.ERROR_500
        assert error_of(await post(rig, PROMPT))[:2] == (502, "prefill_failed")
        assert len(orders(rig)) == len(rig.decode.seen) == 2
        await rig.settled()


async def test_a_prefill_that_hangs_is_timed_out_and_decode_is_let_go() -> None:
    async with running_layerwise_rig(prefill_timeout_s=0.5) as rig:
        rig.prefill.fault = Fault.HANG
        assert error_of(await post(rig, STREAM))[:2] == (502, "prefill_failed")
        assert await let_go(rig.decode.seen[0])
        assert await let_go(rig.prefill.seen[0])
        await rig.settled()


async def test_no_prefill_engine_is_one_error() -> None:
    async with running_layerwise_rig() as rig:
        await rig.prefill.stop()
        assert error_of(await post(rig, PROMPT))[:2] == (502, "prefill_failed")
        assert await let_go(rig.decode.seen[0])
        await rig.settled()


async def test_a_prefill_that_fails_after_the_metaserver_call_broke_ends_decode_all_the_same() -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        rig.prefill.num_dead_after = 0
        rig.decode.num_broken_posts = 3
        client = await send(rig, PROMPT)
        await rig.prefill.next_request()
        await until(lambda: not rig.decode.num_broken_posts)
        while "reservation_lost" not in await rig.failures():
            await asyncio.sleep(0)
        rig.prefill.open_gate(Gate.PREFILL)
        assert error_of(await client.receive())[:2] == (502, "prefill_failed")
        assert await let_go(rig.decode.seen[0])
        await rig.settled()


# Decode fails.


@BOTH
@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.DIE, Fault.EMPTY_200])
async def test_a_decode_that_fails_is_tried_elsewhere_under_a_new_id(fault: Fault, body: dict[str, Any]) -> None:
    async with running_layerwise_rig(num_decode=2) as rig:
        rig.decodes[0].fault = fault
        for _ in range(2):
            assert (await post(rig, body)).status == 200
        ids = [request_id_of(seen) for engine in rig.decodes for seen in engine.seen]
        assert len(ids) == len(set(ids)) >= 3
        await rig.settled()


async def test_a_decode_that_dies_while_it_waits_ends_as_one_error() -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, PROMPT)
        await rig.prefill.next_request()
        await rig.decode.stop()
        assert error_of(await client.receive())[:2] == (502, "decode_lost")
        rig.prefill.open_gate(Gate.PREFILL)
        await rig.settled()


async def test_a_decode_that_dies_in_the_middle_of_a_stream_is_an_error_event_and_a_cut() -> None:
    async with running_layerwise_rig() as rig:
        rig.decode.fault = Fault.DIE_MID_STREAM
        answer = await post(rig, STREAM)
        assert (answer.status, answer.is_whole) == (200, False)
        assert b'"decode_lost"' in answer.chunks[-1] or b'"decode_lost"' in answer.chunks[1]
        await rig.settled()


@BOTH
async def test_a_request_that_decode_gives_back_is_an_error_that_says_why(body: dict[str, Any]) -> None:
    async with running_layerwise_rig() as rig:
        rig.decode.gives_back = True
        answer = await post(rig, body)
        told = b"".join(answer.chunks) or answer.body
        assert b'"decode_lost"' in told
        assert b"recompute_scheduler_enable" in told
        assert b"[DONE]" not in told
        assert b'"stop_reason":"recomputed"' not in told
        await rig.settled()


async def test_a_request_given_back_before_its_answer_is_answered_by_another_decode_engine() -> None:
    async with running_layerwise_rig(num_decode=2) as rig:
        rig.decodes[0].gives_back = True
        for _ in range(2):
            assert (await post(rig, PROMPT)).status == 200
        await rig.settled()


async def test_the_stop_word_recomputed_is_no_more_than_a_word_for_engines_of_ours() -> None:
    said = b'{"choices":[{"text":"a","finish_reason":"stop","stop_reason":"recomputed"}]}'
    async with running_rig() as rig:
        rig.decode.fault = Fault.RAW
        rig.decode.raw = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said)
        assert (await (await rig.client()).post(COMPLETIONS, PROMPT)).body == said


# Time, and clients.


@pytest.mark.parametrize("gate", [Gate.PREFILL, Gate.REPLY])
async def test_a_client_that_leaves_ends_decode_and_prefill_runs_to_its_end_so_that_the_blocks_come_back(
    gate: Gate,
) -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.close_gate(gate)
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, STREAM)
        order = await rig.prefill.next_request()
        client.leave()
        assert await let_go(rig.decode.seen[0])
        assert not order.ended.is_set()
        rig.prefill.open_gate(gate)
        await until(lambda: not rig.wire.held)
        assert not await let_go(order)
        await rig.settled()


async def test_an_order_that_nobody_waits_for_ends_at_the_latest_after_the_prefill_timeout() -> None:
    async with running_layerwise_rig(prefill_timeout_s=0.5) as rig:
        rig.prefill.fault = Fault.HANG
        client = await send(rig, PROMPT)
        order = await rig.prefill.next_request()
        client.leave()
        assert await let_go(order)
        await rig.settled()


async def test_a_call_that_never_comes_is_one_timeout() -> None:
    async with running_layerwise_rig(reservation_timeout_s=0.2) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        assert error_of(await post(rig, PROMPT))[:2] == (504, "deadline_passed")
        assert await let_go(rig.decode.seen[0])
        await rig.settled()


@BOTH
async def test_the_clients_deadline_ends_a_request_during_prefill(body: dict[str, Any]) -> None:
    async with running_layerwise_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        answer = await post(rig, body, headers={"x-request-timeout": "0.5"})
        assert error_of(answer)[:2] == (504, "deadline_passed")
        assert await let_go(rig.decode.seen[0])
        rig.prefill.open_gate(Gate.PREFILL)
        await until(lambda: not rig.wire.held)
        await rig.settled()


async def test_a_push_that_prefill_does_not_know_to_have_failed_ends_at_the_deadline() -> None:
    async with running_layerwise_rig(request_timeout_s=0.5) as rig:
        rig.prefill.num_ranks = 0  # It answers well, and no rank has said "done".
        assert error_of(await post(rig, PROMPT))[:2] == (504, "deadline_passed")
        assert await let_go(rig.decode.seen[0])
        await rig.settled()


# What says nothing of an engine ejects none.


async def circuits(rig: LayerwiseRig) -> set[str]:
    page = (await (await rig.internal()).get("/pdcluster/pool")).json()
    return {engine["circuit"] for engine in page["engines"]}


@BOTH
async def test_a_stop_word_that_a_client_may_have_chosen_ejects_no_engine(body: dict[str, Any]) -> None:
    async with running_layerwise_rig() as rig:
        rig.decode.gives_back = True
        for _ in range(6):
            await post(rig, body)
        assert await circuits(rig) == {"closed"}
        await rig.settled()


async def test_decode_is_not_blamed_for_pushes_that_prefill_does_not_know_to_have_failed() -> None:
    async with running_layerwise_rig(first_byte_timeout_s=0.4) as rig:
        rig.prefill.num_ranks = 0
        for _ in range(6):
            assert (await post(rig, STREAM)).status == 504
        assert await circuits(rig) == {"closed"}
        await rig.settled()


async def test_a_decode_that_was_spared_once_is_to_blame_when_it_is_asked_again_and_hangs_up() -> None:
    """It is the only engine that has failed the request, though it was asked twice."""
    async with running_layerwise_rig(num_prefill=2) as rig:
        for prefill in rig.prefills:
            prefill.num_dead_after = 0
        rig.decode.faults_to_come = [Fault.NONE, Fault.DIE]
        assert error_of(await post(rig, PROMPT))[:2] == (502, "decode_lost")
        assert len(rig.decode.seen) == 2
        decode = next(engine for engine in rig.router.services.all_engines() if engine.role is Role.DECODE)
        assert decode.breaker.has_just_failed
        await rig.settled()
