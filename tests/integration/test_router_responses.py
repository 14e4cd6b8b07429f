"""OpenAI's Responses API through a real router: pairs, tries again, and what is no whole answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from fakes.answers import END, STREAM_HEAD, answer, chunk, models_answer
from fakes.faults import Fault, Gate
from fakes.http import Message, request_bytes
from fakes.layerwise import running_layerwise_rig
from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS
from fakes.responses import RESPONSES, ResponsesWords
from fakes.router import Rig, attempts, orders, running_rig, until
from integration.test_router_model_numbers import tokens_in
from patience import PATIENCE_S
from pdcluster_router.core.apis.responses import NOT_WHOLE, SEVERAL_TURNS

pytestmark = pytest.mark.anyio

PLAIN: Final[dict[str, Any]] = {
    "model": "m",
    "max_output_tokens": 9,
    "instructions": "be kind",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "once upon a time"}]}],
}
STREAM: Final[dict[str, Any]] = {**PLAIN, "stream": True}
BOTH = pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])
WORDS: Final = ResponsesWords({"kv_transfer_params": {"wants_whole": True}}, ["Hello"], "", None)
OURS: Final = {"kv_transfer_params": 0, "store": False}


async def ask(rig: Rig, body: object = PLAIN, headers: dict[str, str] | None = None) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await rig.client()).post(RESPONSES, body, headers)


def code_of(said: bytes) -> str:
    code: str = json.loads(said)["error"]["code"]
    return code


def last_event(got: Message) -> dict[str, Any]:
    name, data = b"".join(got.chunks).removesuffix(b"\n\n").rpartition(b"\n\n")[2].split(b"\n")
    assert name == b"event: error"
    told: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    return told


# Pairs.


@BOTH
async def test_a_request_goes_by_decode_and_prefill_and_its_answer_comes_back_byte_for_byte(
    body: dict[str, Any], tmp_path: Path
) -> None:
    async with running_rig(trace_file=tmp_path / "trace") as rig:
        got = await ask(rig, body)
        order, asked = rig.prefill.seen[0], rig.decode.seen[0]
        whole = b"".join(rig.decode.events(asked)) if body is STREAM else rig.decode.answer(asked)
        assert (got.status, got.is_whole, got.body) == (200, True, whole)
        assert (order.message.path, asked.message.path) == (RESPONSES, RESPONSES)
        assert {**asked.body, "kv_transfer_params": 0} == {**body, **OURS}
        assert {**order.body, "kv_transfer_params": 0} == {**body, **OURS, "stream": False, "max_output_tokens": 1}
        assert asked.num_received > 0
        assert await rig.metric('pdcluster_router_requests_total{outcome="ok"}') == 1
    told = json.loads((tmp_path / "trace").read_text())
    assert (told["status"], bool(told["prefill_replied_at"])) == (200, True)


@BOTH
async def test_the_last_event_of_vllm_0_33_ends_a_stream_too_and_its_tokens_are_counted(
    rig: Rig, body: dict[str, Any]
) -> None:
    events = [*WORDS.events()[:-1], *WORDS.last("response.incomplete", "incomplete")]
    raw = STREAM_HEAD + b"".join(map(chunk, events)) + END
    rig.decode.fault = Fault.RAW
    rig.decode.raw = raw if body is STREAM else answer(200, "application/json", WORDS.one_token())
    got = await ask(rig, body)
    assert (got.status, got.is_whole) == (200, True)
    await rig.settled()
    counted = {"prompt_tokens": PROMPT_TOKENS, "cached_tokens": CACHED_TOKENS, "answer_tokens": 4}
    assert await tokens_in(rig) == {name: (1, number) for name, number in counted.items()}


async def test_decode_that_prefills_by_itself_says_too_that_its_answer_is_whole() -> None:
    models = [models_answer("m"), models_answer("m", sql="/adapters/sql")]
    async with running_rig(models=models) as rig:
        got = await ask(rig, {**PLAIN, "model": "sql"})
        assert (got.status, got.is_whole) == (200, True)
        assert rig.decode.seen[0].params == {"wants_whole": True}


# What is no whole answer.


@BOTH
@pytest.mark.parametrize("fault", [Fault.DIE, Fault.DIE_WITH_KV, Fault.ERROR_500, Fault.EMPTY_200])
async def test_another_decode_engine_answers_before_the_first_byte(body: dict[str, Any], fault: Fault) -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = fault
        got = await ask(rig, body)
        assert (got.status, got.is_whole) == (200, True)
        assert len(rig.decodes[1].seen) == 1


async def test_a_plain_answer_that_its_engine_gave_up_comes_from_another_one() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = Fault.GIVE_UP
        got = await ask(rig)
        assert (got.status, got.json()["kv_transfer_params"]) == (200, {"pdcluster_is_whole": True})
        assert attempts(rig) == [1, 1]
        assert await rig.failures() == {"decode_lost": 1}


async def test_a_plain_answer_that_its_only_engine_gave_up_is_one_error(rig: Rig) -> None:
    rig.decode.fault = Fault.GIVE_UP
    got = await ask(rig)
    assert (got.status, code_of(got.body)) == (502, "decode_lost")
    assert NOT_WHOLE in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (WORDS.whole()[:-20], NOT_WHOLE),
        (b'{"kv_transfer_params":{"pdcluster_is_whole":1}}', NOT_WHOLE),
        (WORDS.whole().replace(b'"input_tokens_per_turn":[]', b'"input_tokens_per_turn":[7,9]'), SEVERAL_TURNS),
        (b"x" * 100_000, NOT_WHOLE),
    ],
    ids=["cut short", "another word", "several turns", "no JSON"],
)
async def test_a_plain_answer_that_does_not_say_that_it_is_whole_is_none(rig: Rig, said: bytes, why: str) -> None:
    rig.decode.fault, rig.decode.raw = Fault.RAW, answer(200, "application/json", said)
    got = await ask(rig)
    assert (got.status, code_of(got.body)) == (502, "decode_lost")
    assert why in got.json()["error"]["message"]


async def test_a_plain_answer_in_many_pieces_is_whole(rig: Rig) -> None:
    rig.decode.padding = "x" * 1_000_000
    got = await ask(rig)
    assert got.body == rig.decode.answer(rig.decode.seen[0])


async def test_a_stream_whose_last_event_comes_in_many_pieces_is_whole(rig: Rig) -> None:
    rig.decode.padding = "x" * 1_000_000
    got = await ask(rig, STREAM)
    assert (got.is_whole, got.body) == (True, b"".join(rig.decode.events(rig.decode.seen[0])))


@pytest.mark.parametrize("gap_s", [0.0, 0.05])
async def test_a_stream_that_its_engine_gave_up_does_not_end_well(rig: Rig, gap_s: float) -> None:
    rig.decode.fault, rig.decode.token_s = Fault.GIVE_UP, gap_s
    got = await ask(rig, STREAM)
    told = b"".join(got.chunks) or got.body
    assert b'"decode_lost"' in told
    assert b"response.completed" not in told
    assert got.status == 502 or not got.is_whole


@pytest.mark.parametrize("fault", [Fault.DIE_MID_STREAM, Fault.ERROR_MID_STREAM])
async def test_a_stream_that_breaks_off_is_one_error_event_and_a_cut(rig: Rig, fault: Fault) -> None:
    rig.decode.fault = fault
    got = await ask(rig, STREAM)
    assert (got.status, got.is_whole) == (200, False)
    assert b"".join(got.chunks).startswith(b"".join(rig.decode.events(rig.decode.seen[0])[:3]))
    told = last_event(got)
    assert (told["type"], told["code"], told["error"]["code"]) == ("error", "decode_lost", "decode_lost")
    assert await rig.metric('pdcluster_router_requests_total{outcome="lost"}') == 1


@pytest.mark.parametrize("num_events", [3, 4])
async def test_a_stream_that_ends_without_its_last_event_does_not_end_well(rig: Rig, num_events: int) -> None:
    events = ResponsesWords(WORDS.body, ["Hello", "!"], "", None).events()[:num_events]
    rig.decode.fault, rig.decode.raw = Fault.RAW, STREAM_HEAD + b"".join(map(chunk, events)) + END
    got = await ask(rig, STREAM)
    assert (got.status, got.is_whole) == (200, False)
    assert last_event(got)["code"] == "decode_lost"


@pytest.mark.parametrize(
    "ending", [WORDS.error_events("no KV"), WORDS.events_given_up(), []], ids=["error", "given up", "nothing"]
)
async def test_a_stream_that_goes_wrong_before_its_first_token_comes_from_another_engine(ending: list[bytes]) -> None:
    raw = STREAM_HEAD + b"".join(map(chunk, [*WORDS.events()[:2], *ending])) + END
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault, rig.decodes[0].raw = Fault.RAW, raw
        got = await ask(rig, STREAM)
        assert (got.status, got.is_whole) == (200, True)
        assert got.body == b"".join(rig.decodes[1].events(rig.decodes[1].seen[0]))


# Prefill.


@BOTH
@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.ERROR_TEXT, Fault.DIE, Fault.GIVE_UP])
async def test_another_prefill_engine_takes_over(body: dict[str, Any], fault: Fault) -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.prefills[0].fault = fault
        got = await ask(rig, body)
        assert (got.status, got.is_whole) == (200, True)
        assert attempts(rig) == [1, 2]


@BOTH
async def test_a_prefill_that_fails_for_good_is_one_error(rig: Rig, body: dict[str, Any]) -> None:
    rig.prefill.fault = Fault.ERROR_500
    got = await ask(rig, body)
    assert (got.status, code_of(got.body)) == (502, "prefill_failed")
    assert len(rig.decode.seen) == 1


@pytest.mark.parametrize("num_bytes", [140_000, 300_000, 3_000_000])
@BOTH
async def test_what_engines_repeat_of_a_request_may_be_long(body: dict[str, Any], num_bytes: int) -> None:
    """The first events of a stream, and prefill's answer, have the client's instructions in them."""
    async with running_rig() as rig:
        got = await ask(rig, {**body, "instructions": "x" * num_bytes})
        assert (got.status, got.is_whole) == (200, True)
        assert (len(rig.prefill.seen), rig.decode.seen[0].num_received > 0) == (1, True)
        assert await rig.failures() == {}


async def test_a_plain_request_is_tried_elsewhere_also_after_prefill_has_failed() -> None:
    """vLLM tells the error of a plain request: a cut is a death."""
    async with running_rig(num_decode=2, max_prefill_attempts=1, on_prefill_failure="recompute") as rig:
        rig.prefill.fault = Fault.ERROR_500
        for decode in rig.decodes:
            decode.fault = Fault.RECOMPUTE
            decode.close_gate(Gate.ANSWER)
        asked = asyncio.create_task(ask(rig))
        await until(lambda: any(decode.seen and decode.seen[0].outcome for decode in rig.decodes))
        first, second = sorted(rig.decodes, key=lambda decode: not decode.seen)
        second.open_gate(Gate.ANSWER)
        first.hang_up_on_all()
        got = await asked
        assert (got.status, got.is_whole) == (200, True)
        assert len(second.seen) == 1


async def test_an_answer_that_does_not_say_that_it_is_whole_tells_nothing_of_an_engines_health() -> None:
    async with running_rig() as rig:
        rig.decode.fault = Fault.GIVE_UP
        for _ in range(8):
            assert (await ask(rig)).status == 502
        assert await rig.metric('pdcluster_router_engine_ejections_total{role="decode"}') == 0


async def test_the_first_byte_of_a_stream_is_not_what_vllm_writes_before_it_begins(tmp_path: Path) -> None:
    async with running_rig(trace_file=tmp_path / "trace") as rig:
        rig.prefill.work_s = 0.3
        assert (await ask(rig, STREAM)).is_whole
    told = json.loads((tmp_path / "trace").read_text())
    assert told["first_byte_at"] - told["received_at"] >= 0.3


async def test_decode_is_not_blamed_for_the_cut_of_a_stream_whose_prefill_has_failed() -> None:
    """That is how vLLM tells an error here."""
    async with running_rig(num_decode=2, max_prefill_attempts=1) as rig:
        rig.prefill.fault = Fault.ERROR_500
        assert code_of((await ask(rig, STREAM)).body) == "prefill_failed"
        assert sum(len(decode.seen) for decode in rig.decodes) == 1
        assert await rig.failures() == {"prefill_failed": 1, "prefill_exhausted": 1}


async def test_decode_that_went_on_by_itself_and_breaks_off_is_lost() -> None:
    async with running_rig(on_prefill_failure="recompute", max_prefill_attempts=1) as rig:
        rig.prefill.fault, rig.decode.fault = Fault.ERROR_500, Fault.RECOMPUTE
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await rig.client()
        await client.send(request_bytes(RESPONSES, json.dumps(STREAM).encode()))
        async with asyncio.timeout(PATIENCE_S):
            told = await client.reader.readuntil(b"output_text.delta")
            rig.decode.hang_up_on_all()
            told += await client.reader.read(-1)
        assert b'"code":"decode_lost"' in told
        assert await rig.failures() == {"prefill_failed": 1, "prefill_exhausted": 1, "decode_lost": 1}


# Clients and limits.


@BOTH
@pytest.mark.parametrize("gate", [Gate.RESERVE, Gate.PREFILL])
async def test_a_client_that_leaves_lets_both_engines_go(rig: Rig, body: dict[str, Any], gate: Gate) -> None:
    for engine in (rig.prefill, rig.decode):
        engine.close_gate(gate)
    client = await rig.client()
    await client.send(request_bytes(RESPONSES, json.dumps(body).encode()))
    asked = await rig.decode.next_request()
    if gate is Gate.PREFILL:
        await rig.prefill.next_request()
    client.leave()
    await asyncio.wait_for(asked.ended.wait(), PATIENCE_S)
    await until(lambda: all(order.is_disconnected for order in orders(rig)))


@pytest.mark.parametrize(
    ("fields", "cure"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole conversation as input"),
        ({"background": True}, "stream a long answer"),
        ({"stop": ["e"]}, "use /v1/chat/completions"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}]}, "call them yourself"),
        ({"vllm_xargs": {"kv_transfer_params": 1}}, "leave it out"),
    ],
)
async def test_a_request_for_what_is_not_served_is_one_error_with_the_cure(
    rig: Rig, fields: dict[str, Any], cure: str
) -> None:
    got = await ask(rig, {**PLAIN, **fields})
    assert (got.status, code_of(got.body)) == (400, "invalid_request")
    assert cure in got.json()["error"]["message"]
    assert not rig.decode.seen


@pytest.mark.parametrize("path", [f"{RESPONSES}/resp_1", f"{RESPONSES}/resp_1/cancel"])
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_stored_responses_are_refused_and_the_error_names_the_cure(rig: Rig, path: str, method: str) -> None:
    client = await rig.client()
    await client.send(request_bytes(path, b'{"input":"a"}', method=method))
    got = await asyncio.wait_for(client.receive(), PATIENCE_S)
    assert (got.status, code_of(got.body)) == (404, "responses_not_stored")
    assert "take the answer of POST /v1/responses" in got.json()["error"]["message"]
    assert not rig.decode.seen


async def test_another_method_is_refused(rig: Rig) -> None:
    got = await (await rig.client()).get(RESPONSES)
    assert (got.status, code_of(got.body)) == (405, "method_not_allowed")


async def test_engines_that_give_requests_back_unseen_serve_no_responses() -> None:
    async with running_layerwise_rig() as rig:
        got = await ask(rig)
        assert (got.status, code_of(got.body)) == (404, "responses_not_served")
        assert not rig.decode.seen
