"""Requests for several sequences, served in parts over real sockets: one answer, one error, nothing left over."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.access_log import Log, ask, logged_rig, some
from fakes.answers import END, error_body, json_answer
from fakes.faults import Fault, Gate
from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS
from fakes.router import CHAT, Rig, orders, post, raw, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.requests.keep_alive import COMMENT
from pdcluster_router.requests.exchange import Exchange

pytestmark = pytest.mark.anyio

TWO: dict[str, Any] = {"model": "m", "prompt": ["once", "upon"], "max_tokens": 8}
STREAM: dict[str, Any] = {**TWO, "stream": True, "stream_options": {"include_usage": True}}
THREE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 3, "seed": 7}
BOTH = pytest.mark.parametrize("body", [TWO, STREAM], ids=["plain", "stream"])
USAGE = {"prompt_tokens": 2 * PROMPT_TOKENS, "completion_tokens": 8, "total_tokens": 2 * PROMPT_TOKENS + 8}


def let_parrot(rig: Rig) -> None:
    for engine in (*rig.decodes, *rig.prefills):
        engine.is_parrot = True


def texts_of(body: bytes) -> dict[int, str]:
    """The text of each choice of a stream, by its index."""
    texts: dict[int, str] = {}
    for event in body.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"]["content"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def said(prompt: object, seed: int | None = None) -> str:
    return f"{json.dumps(prompt)} seed {seed}: Hello, world!"


async def told(rig: Rig) -> dict[str, int]:
    """Failures, but for reservations of parts that were withdrawn meanwhile."""
    return {kind: count for kind, count in (await rig.failures()).items() if kind != "reservation_refused"}


async def test_each_prompt_of_a_list_goes_its_own_way_and_one_answer_comes(rig: Rig) -> None:
    let_parrot(rig)
    answer = await post(rig, TWO, {"x-request-id": "R"})
    assert (answer.status, answer.headers["x-request-id"]) == (200, "R")
    found = answer.json()
    assert [(one["index"], one["text"]) for one in found["choices"]] == [(0, said(["once"])), (1, said(["upon"]))]
    assert (found["id"], found["usage"]) == ("cmpl-R", USAGE)
    for engine in (rig.decode, rig.prefill):
        assert [seen.message.headers["x-request-id"] for seen in engine.seen] == ["R-0", "R-1"]
    transfers = {(seen.params or {})["transfer_id"] for seen in rig.decode.seen}
    assert len(transfers) == 2
    assert {(seen.params or {})["transfer_id"] for seen in rig.prefill.seen} == transfers
    assert await rig.metric("pdcluster_router_local_prefill_total") == 0


async def test_a_stream_has_all_choices_one_usage_and_one_end(rig: Rig) -> None:
    let_parrot(rig)
    answer = await post(rig, STREAM, {"x-request-id": "R"})
    assert answer.status == 200
    assert answer.is_whole
    assert (answer.headers["content-type"], answer.headers["x-engine"]) == ("text/event-stream; charset=utf-8", "fake")
    assert texts_of(answer.body) == {0: said(["once"]), 1: said(["upon"])}
    assert answer.body.count(b"[DONE]") == answer.body.count(b'"usage"') == 1
    last = answer.body.split(b"\n\n")[-3]
    assert json.loads(last.removeprefix(b"data: "))["usage"] == USAGE


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["plain", "stream"])
async def test_choices_of_a_chat_have_their_own_seeds_and_one_prefill_engine(more: dict[str, Any]) -> None:
    async with running_rig(num_prefill=3, num_decode=3) as rig:
        let_parrot(rig)
        answer = await (await rig.client()).post(CHAT, {**THREE, **more})
        assert answer.status == 200
        if more:
            texts = texts_of(answer.body)
        else:
            found = answer.json()
            texts = {one["index"]: one["message"]["content"] for one in found["choices"]}
            assert found["usage"]["prompt_tokens"] == PROMPT_TOKENS
        assert texts == {number: said(THREE["messages"], 7 + number) for number in range(3)}
        assert sorted(len(engine.seen) for engine in rig.prefills) == [0, 0, 3]
        assert [len(engine.seen) for engine in rig.decodes] == [1, 1, 1]


async def test_prompts_of_a_list_spread_over_the_prefill_engines() -> None:
    async with running_rig(num_prefill=2) as rig:
        for engine in rig.prefills:
            engine.close_gate(Gate.PREFILL)
        client = await send(rig, {**TWO, "prompt": ["a", "b", "c", "d"]})
        await until(lambda: len(orders(rig)) == 4)
        assert [len(engine.seen) for engine in rig.prefills] == [2, 2]
        for engine in rig.prefills:
            engine.open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200


# Failures.


@BOTH
async def test_a_part_whose_attempt_fails_is_tried_again_and_the_client_sees_nothing(body: dict[str, Any]) -> None:
    async with running_rig(num_prefill=2, num_decode=2) as rig:
        rig.prefills[0].faults_to_come = [Fault.ERROR_500]
        rig.decodes[1].faults_to_come = [Fault.ERROR_500]
        assert (await post(rig, body)).status == 200


async def test_a_plain_part_that_breaks_off_is_tried_again() -> None:
    """Nothing of it has gone to the client: it is held until it is whole."""
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = Fault.RAW
        rig.decodes[0].raw = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"id"'
        client = await send(rig, TWO)
        await rig.decodes[0].next_request()
        rows = [one.record.row for one in rig.router.services.running]
        await until(lambda: any("first_byte" in row().moments for row in rows))
        rig.decodes[0].hang_up_on_all()
        assert (await client.receive()).status == 200


@BOTH
async def test_a_part_that_fails_for_good_is_the_clients_one_error_and_the_others_end(body: dict[str, Any]) -> None:
    async with running_rig(num_decode=2, max_decode_attempts=1) as rig:
        rig.decodes[0].close_gate(Gate.ANSWER)
        rig.decodes[1].fault = Fault.ERROR_500
        answer = await post(rig, body)
        assert answer.status == 500
        assert b"engine says no" in answer.body
        for seen in rig.decodes[0].seen:
            await asyncio.wait_for(seen.ended.wait(), PATIENCE_S)
            assert seen.is_disconnected
        await rig.settled()
        assert await rig.metric('pdcluster_router_requests_total{outcome="engine_error"}') == 1
        assert await told(rig) == {"decode_error": 1, "withdrawn": 1}


@pytest.mark.parametrize("fault", [Fault.DIE_MID_STREAM, Fault.ERROR_MID_STREAM, Fault.GIVE_UP])
async def test_a_part_that_breaks_off_in_a_stream_is_an_error_event_and_a_cut(fault: Fault) -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = fault
        for engine in rig.decodes:
            engine.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, STREAM)
        begun = await client.reader.readuntil(b'"index":1')
        rig.decodes[0].open_gate(Gate.SECOND_TOKEN)
        rest = await client.reader.read()
        assert b'"code":"decode_lost"' in rest
        assert (begun + rest).count(b'{"error"') == 1
        assert b"[DONE]" not in rest
        assert not rest.endswith(END)
        await rig.settled()


async def test_a_prompt_that_its_engine_refuses_is_the_answer_though_another_has_its_own_already() -> None:
    """vLLM looks at all prompts before it answers any."""
    async with running_rig(num_decode=2) as rig:
        rig.decodes[1].fault, rig.decodes[1].raw = Fault.RAW, b""
        client = await send(rig, STREAM)
        for engine in rig.decodes:
            await engine.next_request()
        await asyncio.wait_for(rig.decodes[0].seen[0].ended.wait(), PATIENCE_S)
        await until(lambda: len(rig.router.services.running) == 1)
        rig.decodes[1].say(json_answer(404, error_body("The model `x` does not exist.", 404)))
        answer = await client.receive()
        assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
        assert b"does not exist" in answer.body


async def test_an_answer_that_is_no_completion_is_an_error(rig: Rig) -> None:
    rig.decode.fault, rig.decode.raw = Fault.RAW, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    answer = await post(rig, TWO)
    assert (answer.status, answer.json()["error"]["code"]) == (502, "decode_lost")
    assert await rig.failures() == {"decode_lost": 1}
    assert await rig.metric('pdcluster_router_requests_total{outcome="lost"}') == 1


@BOTH
async def test_a_client_that_leaves_withdraws_every_part(rig: Rig, body: dict[str, Any]) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig, body)
    await until(lambda: len(rig.prefill.seen) == 2)
    client.leave()
    await rig.settled()
    for seen in rig.prefill.seen:
        await asyncio.wait_for(seen.ended.wait(), PATIENCE_S)
        assert seen.is_disconnected
    assert await rig.metric('pdcluster_router_requests_total{outcome="client_gone"}') == 1
    assert await rig.failures() == {"client_gone": 1, "withdrawn": 2}


async def test_a_client_that_leaves_in_a_stream_withdraws_every_part(rig: Rig) -> None:
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await send(rig, STREAM)
    await client.reader.readuntil(b'"index":1')
    client.leave()
    await rig.settled()
    assert await rig.failures() == {"client_gone": 1, "withdrawn": 2}


async def test_a_router_that_stops_ends_all_parts_with_one_error() -> None:
    async with running_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, TWO)
        await until(lambda: len(rig.prefill.seen) == 2)
        await rig.router.wait_until_idle(0)
        answer = await client.receive()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "stopped")
        assert await rig.failures() == {"stopped": 1, "withdrawn": 1}


# Limits.


async def test_each_part_waits_for_its_own_room_and_counts_in_the_backlog() -> None:
    async with running_rig(max_prefill_backlog_tokens=20, max_queued_requests=5) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, {**TWO, "prompt": ["x" * 400, "y" * 400, "z" * 400, "a" * 400, "b" * 400, "c" * 400]})
        await until(lambda: rig.router.services.num_queued == 2)
        assert rig.router.services.admissions.shared[Role.PREFILL].backlog_tokens == 4 * 5
        await until(lambda: len(rig.decode.seen) == 4)
        rig.prefill.open_gate(Gate.PREFILL)
        assert len((await client.receive()).json()["choices"]) == 6


async def test_a_part_that_finds_the_queue_full_is_the_whole_requests_error() -> None:
    async with running_rig(max_prefill_backlog_tokens=20, max_queued_requests=1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        answer = await post(rig, {**TWO, "prompt": [letter * 400 for letter in "abcdefgh"]})
        assert (answer.status, answer.json()["error"]["code"]) == (429, "queue_full")
        await rig.settled()
        assert await rig.metric('pdcluster_router_requests_total{outcome="overloaded"}') == 1
        assert await told(rig) == {"queue_full": 1, "withdrawn": 5}


async def test_parts_that_wait_are_turned_away_as_one_when_the_router_drains() -> None:
    async with running_rig(max_prefill_backlog_tokens=20) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, {**TWO, "prompt": [letter * 400 for letter in "abcdefg"]})
        await until(lambda: rig.router.services.num_queued == 3)
        rig.router.drain()
        answer = await client.receive()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "draining")
        assert await told(rig) == {"draining": 1, "withdrawn": 6}
        assert await rig.metric('pdcluster_router_queue_wait_seconds_count{client=""}') == 3
        assert await rig.metric('pdcluster_router_requests_total{outcome="rejected"}') == 1


async def test_parts_that_wait_too_long_are_turned_away_as_one() -> None:
    async with running_rig(max_prefill_backlog_tokens=20, queue_timeout_s=0.3) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        answer = await post(rig, {**TWO, "prompt": [letter * 400 for letter in "abcdefg"]})
        assert (answer.status, answer.json()["error"]["code"]) == (503, "queue_timeout")
        await rig.settled()
        assert await told(rig) == {"queue_timeout": 1, "withdrawn": 6}
        assert await rig.metric('pdcluster_router_queue_wait_seconds_count{client=""}') == 3


async def test_parts_that_enter_at_once_of_which_the_first_fails_give_their_room_back() -> None:
    """The first one finds no decode engine: the others have entered, and begin nothing."""
    async with running_rig(max_prefill_backlog_tokens=4000, max_decode_attempts=1) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        others = [await send(rig, {"prompt": "x" * 16000}) for _ in range(4)]
        await until(lambda: len(rig.decode.seen) == 4)
        client = await send(rig, {**TWO, "prompt": ["a" * 2000, "b" * 2000, "c" * 2000]})
        await until(lambda: rig.router.services.num_queued == 3)
        roster = rig.router.services.roster
        roster.update([member for member in roster.members if member.role is Role.PREFILL])
        rig.decode.open_gate(Gate.RESERVE)
        answer = await client.receive()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_decode_engine")
        assert [(await one.receive()).status for one in others] == [200] * 4
        await rig.settled()
        assert await told(rig) == {"no_decode": 1, "withdrawn": 2}
        assert await rig.metric('pdcluster_router_queue_wait_seconds_count{client=""}') == 3


async def test_a_client_that_reads_slowly_holds_every_part_back_and_gets_all(rig: Rig) -> None:
    rig.decode.tokens, rig.decode.padding = ["a"] * 40, "x" * 200_000
    client = await rig.client()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
    await client.send(raw({**TWO, "stream": True}))
    await until(lambda: rig.connection_of(client).is_full)
    relays = [one._relay for one in rig.router.services.running if isinstance(one, Exchange)]
    assert [relay.is_paused for relay in relays] == [True, True]
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # likewise
    answer = await client.receive()
    assert answer.body.count(b'"index":0') == answer.body.count(b'"index":1') == 40


async def test_a_stream_of_which_no_part_has_begun_is_kept_alive() -> None:
    async with running_rig(keep_alive_s=0.1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, STREAM)
        await client.reader.readuntil(COMMENT)
        rig.prefill.open_gate(Gate.PREFILL)
        answer = await client.reader.readuntil(END)
        assert answer.count(b'"index": ') + answer.count(b'"index":') == 8


# What is told.


async def test_a_request_in_parts_has_one_line_in_the_access_log(tmp_path: Path) -> None:
    log = Log(tmp_path / "access")
    async with logged_rig(log, num_decode=2, num_prefill=2) as rig:
        await ask(rig, TWO, x_request_id="R")
        await ask(rig, STREAM)
    for line in log.lines:
        assert some(line, "parts", "outcome", "status", "failures") == (2, "ok", 200, [])
        assert some(line, "decode_engine", "prefill_engine") == ("decode-0,decode-1", "prefill-0,prefill-1")
        assert some(line, "decode_attempts", "prefill_attempts", "is_local_prefill") == (2, 2, False)
        assert some(line, "prompt_tokens", "cached_tokens") == (2 * PROMPT_TOKENS, 2 * CACHED_TOKENS)
        assert line["output_tokens"] == 8
    assert log.lines[0]["request_id"] == "R"


async def test_the_access_log_names_the_failure_and_not_the_parts_that_ended_with_it(tmp_path: Path) -> None:
    log = Log(tmp_path / "access")
    async with logged_rig(log, num_decode=2, max_decode_attempts=1) as rig:
        rig.decodes[0].close_gate(Gate.ANSWER)
        rig.decodes[1].fault = Fault.ERROR_500
        assert (await ask(rig, TWO)).status == 500
    assert some(log.line, "parts", "outcome", "status", "failures") == (2, "engine_error", 500, ["decode_error"])


async def test_a_request_in_parts_is_counted_once(rig: Rig) -> None:
    await post(rig, TWO)
    await rig.settled()
    assert await rig.metric('pdcluster_router_requests_total{outcome="ok"}') == 1
    for phase, count in (("total", 1), ("first_byte", 1), ("reservation", 2), ("prefill", 2)):
        assert await rig.metric(f'pdcluster_router_phase_seconds_count{{phase="{phase}"}}') == count


async def test_an_error_counts_no_first_byte_although_a_part_had_one() -> None:
    async with running_rig(num_decode=2, max_decode_attempts=1) as rig:
        rig.decodes[1].close_gate(Gate.ANSWER)
        client = await send(rig, TWO)
        await rig.decodes[1].next_request()
        rows = [one.record.row for one in rig.router.services.running]
        await until(lambda: any("first_byte" in row().moments for row in rows))
        rig.decodes[1].hang_up_on_all()
        assert (await client.receive()).status >= 500
        await rig.settled()
        assert await rig.metric('pdcluster_router_phase_seconds_count{phase="total"}') == 1
        assert await rig.metric('pdcluster_router_phase_seconds_count{phase="first_byte"}') == 0
