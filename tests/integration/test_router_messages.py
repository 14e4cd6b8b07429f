"""Anthropic's Messages API through a real router: pairs, tries again, and what is no whole answer."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest

from fakes.answers import END, STREAM_HEAD, answer, chunk
from fakes.faults import Fault, Gate
from fakes.http import Message, request_bytes
from fakes.layerwise import running_layerwise_rig
from fakes.messages import MESSAGES, MessagesWords
from fakes.router import Rig, attempts, orders, running_rig, until
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

PLAIN: Final[dict[str, Any]] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "once upon a time"}],
}
STREAM: Final[dict[str, Any]] = {**PLAIN, "stream": True}
BOTH = pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])
WORDS: Final = MessagesWords(PLAIN, ["Hello"], "", None)


async def ask(rig: Rig, body: object = PLAIN, path: str = MESSAGES, headers: dict[str, str] | None = None) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await rig.client()).post(path, body, headers)


def error_of(said: bytes) -> tuple[str, str]:
    """Type and code of an error in Anthropic's shape."""
    told = json.loads(said)
    assert set(told) == {"type", "error"}
    assert told["type"] == "error"
    assert set(told["error"]) == {"type", "message", "code"}
    return told["error"]["type"], told["error"]["code"]


def last_event(answer: Message) -> tuple[str, str]:
    name, data = b"".join(answer.chunks).removesuffix(b"\n\n").rpartition(b"\n\n")[2].split(b"\n")
    assert name == b"event: error"
    return error_of(data.removeprefix(b"data: "))


# Pairs.


@BOTH
async def test_a_request_goes_by_decode_and_prefill_and_its_answer_comes_back_byte_for_byte(
    body: dict[str, Any], tmp_path: Path
) -> None:
    async with running_rig(trace_file=tmp_path / "trace") as rig:
        got = await ask(rig, body, f"{MESSAGES}?beta=true", {"anthropic-version": "2023-06-01"})
        order, asked = rig.prefill.seen[0], rig.decode.seen[0]
        whole = b"".join(rig.decode.events(asked)) if body is STREAM else rig.decode.answer(asked)
        assert (got.status, got.is_whole, got.body) == (200, True, whole)
        assert (order.message.path, asked.message.path) == (MESSAGES, MESSAGES)
        assert asked.message.headers["anthropic-version"] == "2023-06-01"
        assert {**asked.body, "kv_transfer_params": 0} == {**body, "kv_transfer_params": 0}
        assert {**order.body, "kv_transfer_params": 0} == {
            **body,
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": 0,
        }
        assert asked.num_received > 0
        assert await rig.metric('pdcluster_router_requests_total{outcome="ok"}') == 1
    told = json.loads((tmp_path / "trace").read_text())
    assert (told["status"], bool(told["prefill_replied_at"])) == (200, True)


async def test_prefill_is_not_held_to_a_named_tool_and_a_tools_input_may_say_what_it_likes(rig: Rig) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    got = await ask(rig, {**PLAIN, "tools": tools, "tool_choice": {"type": "tool", "name": "f"}})
    assert (got.status, got.json()["content"][0]["type"]) == (200, "tool_use")
    assert rig.prefill.seen[0].body["tool_choice"] == {"type": "any"}
    assert rig.decode.seen[0].body["tool_choice"] == {"type": "tool", "name": "f"}


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
        assert (got.status, got.json()["stop_reason"]) == (200, "end_turn")
        assert attempts(rig) == [1, 1]
        assert await rig.failures() == {"decode_lost": 1}


async def test_a_plain_answer_that_its_only_engine_gave_up_is_one_error(rig: Rig) -> None:
    rig.decode.fault = Fault.GIVE_UP
    got = await ask(rig)
    assert (got.status, error_of(got.body)) == (502, ("api_error", "decode_lost"))
    assert "no stop_reason" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    "said",
    [
        WORDS.whole()[:-20],
        b'{"type":"message"}',
        WORDS.whole().replace(b'"end_turn"', b"null"),
        b"x" * 100_000,
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_what_does_not_say_why_it_ended_is_no_answer(rig: Rig, said: bytes, is_chunked: bool) -> None:
    head = STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/json")
    pieces = [said[at : at + 10_000] for at in range(0, len(said), 10_000)]
    in_chunks = head + b"".join(map(chunk, pieces)) + END
    rig.decode.fault = Fault.RAW
    rig.decode.raw = in_chunks if is_chunked else answer(200, "application/json", said)
    got = await ask(rig)
    assert (got.status, error_of(got.body)) == (502, ("api_error", "decode_lost"))


async def test_a_plain_answer_in_many_pieces_is_whole(rig: Rig) -> None:
    rig.decode.padding = "x" * 1_000_000
    got = await ask(rig)
    assert got.body == rig.decode.answer(rig.decode.seen[0])


@pytest.mark.parametrize("gap_s", [0.0, 0.05])
async def test_a_stream_that_its_engine_gave_up_does_not_end_well(rig: Rig, gap_s: float) -> None:
    rig.decode.fault, rig.decode.token_s = Fault.GIVE_UP, gap_s
    got = await ask(rig, STREAM)
    told = b"".join(got.chunks) or got.body
    assert b'"decode_lost"' in told
    assert b'"delta":{"stop_reason":null' not in told
    assert b"message_stop" not in told
    assert got.status == 502 or not got.is_whole


@pytest.mark.parametrize("fault", [Fault.DIE_MID_STREAM, Fault.ERROR_MID_STREAM])
async def test_a_stream_that_breaks_off_is_one_error_event_and_a_cut(rig: Rig, fault: Fault) -> None:
    rig.decode.fault = fault
    got = await ask(rig, STREAM)
    assert (got.status, got.is_whole) == (200, False)
    assert b"".join(got.chunks).startswith(b"".join(rig.decode.events(rig.decode.seen[0])[:3]))
    assert last_event(got) == ("api_error", "decode_lost")
    assert await rig.metric('pdcluster_router_requests_total{outcome="lost"}') == 1


@pytest.mark.parametrize("num_events", [2, 3])
async def test_a_stream_that_ends_without_a_reason_does_not_end_well(rig: Rig, num_events: int) -> None:
    events = WORDS.events()[:num_events]
    rig.decode.fault, rig.decode.raw = Fault.RAW, STREAM_HEAD + b"".join(map(chunk, events)) + END
    got = await ask(rig, STREAM)
    assert (got.status, got.is_whole) == (200, False)
    assert last_event(got) == ("api_error", "decode_lost")


@pytest.mark.parametrize(
    "ending", [WORDS.error_events("no KV"), WORDS.events_given_up(), []], ids=["error", "given up", "nothing"]
)
async def test_a_stream_that_goes_wrong_before_its_first_token_comes_from_another_engine(ending: list[bytes]) -> None:
    raw = STREAM_HEAD + b"".join(map(chunk, [WORDS.events()[0], *ending])) + END
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault, rig.decodes[0].raw = Fault.RAW, raw
        got = await ask(rig, STREAM)
        assert (got.status, got.is_whole) == (200, True)
        assert got.body == b"".join(rig.decodes[1].events(rig.decodes[1].seen[0]))


async def test_an_error_as_a_streams_first_event_is_a_status_of_its_own(rig: Rig) -> None:
    rig.prefill.fault = Fault.HANG
    events = WORDS.error_events("no KV")
    rig.decode.fault, rig.decode.raw = Fault.RAW, STREAM_HEAD + b"".join(map(chunk, events)) + END
    got = await ask(rig, STREAM)
    assert (got.status, got.json()["error"]["message"]) == (500, "no KV")


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
    assert (got.status, error_of(got.body)) == (502, ("api_error", "prefill_failed"))


# Clients and limits.


@BOTH
@pytest.mark.parametrize("gate", [Gate.RESERVE, Gate.PREFILL])
async def test_a_client_that_leaves_lets_both_engines_go(rig: Rig, body: dict[str, Any], gate: Gate) -> None:
    for engine in (rig.prefill, rig.decode):
        engine.close_gate(gate)
    client = await rig.client()
    await client.send(request_bytes(MESSAGES, json.dumps(body).encode()))
    asked = await rig.decode.next_request()
    if gate is Gate.PREFILL:
        await rig.prefill.next_request()
    client.leave()
    await asyncio.wait_for(asked.ended.wait(), PATIENCE_S)
    assert asked.is_disconnected or gate is Gate.PREFILL  # Then decode is told that there is no KV, and may say so.
    await until(lambda: all(order.is_disconnected for order in orders(rig)))


@BOTH
async def test_the_clients_own_deadline_ends_a_request(rig: Rig, body: dict[str, Any]) -> None:
    rig.prefill.fault = Fault.HANG
    got = await ask(rig, body, headers={"x-request-timeout": "1"})
    assert (got.status, error_of(got.body)) == (504, ("timeout_error", "deadline_passed"))
    await asyncio.wait_for(rig.decode.seen[0].ended.wait(), PATIENCE_S)


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (MESSAGES, b"{", 400, ("invalid_request_error", "invalid_request")),
        (MESSAGES, b"[]", 400, ("invalid_request_error", "invalid_request")),
        (MESSAGES, b'{"vllm_xargs":{"kv_transfer_params":1}}', 400, ("invalid_request_error", "invalid_request")),
        (MESSAGES, b"x" * 2000, 413, ("request_too_large", "body_too_large")),
        (f"{MESSAGES}/count_tokens", b"x" * 2000, 413, ("request_too_large", "body_too_large")),
        (f"{MESSAGES}/batches", b"{}", 404, ("not_found_error", "not_found")),
    ],
)
async def test_what_cannot_be_served_is_an_error_in_anthropics_shape(
    path: str, body: bytes, status: int, error: tuple[str, str]
) -> None:
    async with running_rig(max_body_bytes=1024) as rig:
        got = await ask(rig, body, path)
        assert (got.status, error_of(got.body)) == (status, error)
        assert not rig.decode.seen


async def test_another_method_is_refused_in_anthropics_shape(rig: Rig) -> None:
    got = await (await rig.client()).get(MESSAGES)
    assert (got.status, error_of(got.body)) == (405, ("invalid_request_error", "method_not_allowed"))


async def test_an_engines_own_refusal_is_passed_on_as_it_is(rig: Rig) -> None:
    rig.decode.fault = Fault.ERROR_404
    got = await ask(rig)
    assert (got.status, got.body) == (404, WORDS.error("The model `x` does not exist.", 404))
    rig.decode.fault = Fault.ERROR_TEXT
    got = await ask(rig)
    assert (got.status, error_of(got.body)) == (500, ("api_error", "engine_error"))


async def test_a_key_is_shown_as_anthropics_clients_do_and_goes_no_further(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{sha256(b'sk-first').hexdigest()}  team-a\n")
    async with running_rig(api_key_file=file) as rig:
        assert (await ask(rig, headers={"x-api-key": "sk-first"})).status == 200
        shown = [set(engine.seen[0].message.headers) for engine in (rig.prefill, rig.decode)]
        assert not {"x-api-key", "authorization"} & (shown[0] | shown[1])
        assert (await ask(rig, path=f"{MESSAGES}/count_tokens", headers={"x-api-key": "sk-first"})).status == 200
        for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
            got = await ask(rig, path=path, headers={"x-api-key": "sk-wrong"})
            assert (got.status, error_of(got.body)) == (401, ("authentication_error", "invalid_api_key"))


async def test_where_clients_need_no_key_theirs_is_for_the_engines(rig: Rig) -> None:
    assert (await ask(rig, headers={"x-api-key": "sk-first"})).status == 200
    for engine in (rig.prefill, rig.decode):
        assert engine.seen[0].message.headers["x-api-key"] == "sk-first"


# What is not served.


async def test_engines_that_give_requests_back_unseen_serve_no_messages() -> None:
    async with running_layerwise_rig() as rig:
        got = await ask(rig)
        assert (got.status, error_of(got.body)) == (404, ("not_found_error", "messages_not_served"))
        assert not rig.decode.seen


@pytest.mark.parametrize("lines", [{"x-session-id": "s" * 100_000}, {f"x-{index}": "a" for index in range(300)}])
async def test_a_head_that_is_too_large_is_refused_in_anthropics_shape(rig: Rig, lines: dict[str, str]) -> None:
    got = await ask(rig, path=f"{MESSAGES}?beta=true", headers=lines)
    assert got.status == 431
    assert error_of(got.body)[0] == "invalid_request_error"
