"""The access log: one line for each request of a client that has ended, and what it says of the answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.access_log import TALK, Log, ask, logged_rig, some
from fakes.faults import Fault, Gate
from fakes.messages import MESSAGES
from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS
from fakes.router import CHAT, COMPLETIONS, PROMPT, STREAM, orders, raw, send, until
from patience import PATIENCE_S
from pdcluster_protocol.access import AccessLine
from pdcluster_router.core.requests.keep_alive import COMMENT

pytestmark = pytest.mark.anyio


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "access")


async def test_a_plain_answer_is_told_whole(log: Log) -> None:
    async with logged_rig(log) as rig:
        answer = await ask(rig, x_request_id="R-7")
    line = log.line
    assert list(line) == ["event", *AccessLine.__struct_fields__]
    assert some(line, "event", "request_id", "method", "path", "model") == ("access", "R-7", "POST", COMPLETIONS, "m")
    assert answer.headers["x-request-id"] == "R-7"
    assert some(line, "status", "outcome", "is_stream", "failures") == (200, "ok", False, [])
    assert some(line, "decode_engine", "prefill_engine", "revision") == ("decode-0", "prefill-0", "")
    assert some(line, "decode_attempts", "prefill_attempts", "is_local_prefill") == (1, 1, False)
    assert some(line, "prompt_tokens", "cached_tokens", "output_tokens") == (PROMPT_TOKENS, CACHED_TOKENS, 4)
    assert some(line, "bytes_in", "bytes_out") == (len(json.dumps(PROMPT)), len(answer.body))
    assert some(line, "events", "gap_p50_s", "gap_max_s") == (None, None, None)
    assert line["ts"].endswith("Z")


async def test_its_times_follow_each_other_and_none_is_missing(log: Log) -> None:
    async with logged_rig(log) as rig:
        rig.prefill.work_s = 0.1
        await ask(rig)
    line = log.line
    times = some(line, "queue_s", "reservation_s", "first_byte_s", "total_s")
    assert times[0] >= 0
    assert list(times) == sorted(times)
    assert 0.09 <= line["prefill_s"] <= line["first_byte_s"]
    assert line["read_s"] >= 0


async def test_the_transfer_id_is_that_of_the_trace(log: Log, tmp_path: Path) -> None:
    async with logged_rig(log, trace_file=tmp_path / "trace") as rig:
        await ask(rig)
    assert json.loads((tmp_path / "trace").read_text())["transfer_id"] == log.line["transfer_id"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, TALK)])
async def test_a_stream_has_tokens_if_its_client_asked_for_usage(log: Log, path: str, body: dict[str, Any]) -> None:
    async with logged_rig(log) as rig:
        await ask(rig, {**body, "stream": True, "stream_options": {"include_usage": True}}, path)
        await ask(rig, {**body, "stream": True}, path)
    first, second = log.lines
    assert some(first, "is_stream", "events", "output_tokens", "prompt_tokens") == (True, 5, 4, PROMPT_TOKENS)
    assert some(second, "is_stream", "events", "output_tokens", "prompt_tokens") == (True, 4, None, PROMPT_TOKENS)


async def test_the_pauses_of_a_stream_are_told(log: Log) -> None:
    async with logged_rig(log) as rig:
        rig.decode.token_s = 0.02
        await ask(rig, STREAM)
    line = log.line
    assert 0.015 < line["gap_p50_s"] <= line["gap_max_s"] < line["total_s"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_of_the_messages_api_tokens_are_always_known(log: Log, is_stream: bool) -> None:
    async with logged_rig(log) as rig:
        await ask(rig, {**TALK, "stream": is_stream}, MESSAGES)
    assert some(log.line, "path", "output_tokens", "outcome") == (MESSAGES, 4, "ok")


async def test_where_decode_prefills_tokens_are_those_of_its_answer(log: Log) -> None:
    async with logged_rig(log) as rig:
        await ask(rig, {**PROMPT, "echo": True})
    line = log.line
    assert some(line, "is_local_prefill", "prefill_engine", "prefill_attempts") == (True, "", 0)
    assert some(line, "prompt_tokens", "cached_tokens", "output_tokens") == (PROMPT_TOKENS, None, 4)
    assert some(line, "reservation_s", "prefill_s") == (None, None)


async def test_a_prompt_of_which_decode_computes_the_rest_is_told_as_decode_has_counted_it(log: Log) -> None:
    async with logged_rig(log) as rig:
        rig.decode.fault = Fault.LOCAL
        assert (await ask(rig)).status == 200
    line = log.line
    assert some(line, "is_local_prefill", "prefill_engine", "prefill_attempts", "prefill_s") == (True, "", 0, None)
    assert some(line, "prompt_tokens", "cached_tokens") == (PROMPT_TOKENS, CACHED_TOKENS)


async def test_a_prompt_that_another_decode_engine_has_pushed_is_no_local_one(log: Log) -> None:
    async with logged_rig(log, num_decode=2) as rig:
        rig.decodes[0].faults_to_come = [Fault.LOCAL_AND_DIE]
        for _ in range(2):
            assert (await ask(rig)).status == 200
    (line,) = [line for line in log.lines if line["failures"]]
    assert some(line, "is_local_prefill", "decode_attempts", "prefill_attempts") == (False, 2, 1)


async def test_an_order_without_an_answer_has_no_time_though_the_one_before_had(log: Log) -> None:
    async with logged_rig(log, num_prefill=2) as rig:
        for prefill, fault in zip(rig.prefills, (Fault.ERROR_500, Fault.HANG), strict=True):
            prefill.faults_to_come = [fault]
        client = await send(rig)
        await until(lambda: len(orders(rig)) == 2)
        client.leave()
        await rig.settled()
    assert some(log.line, "prefill_attempts", "prefill_s") == (2, None)


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_the_trace_of_the_client_is_told(log: Log, path: str) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with logged_rig(log) as rig:
        await ask(rig, PROMPT, path, traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
        await ask(rig, PROMPT, path, traceparent=f"00-{trace_id}-b7ad6b7169203331")
    assert [line["trace_id"] for line in log.lines] == [trace_id, ""]


async def test_a_second_attempt_is_counted_and_the_engine_is_the_one_that_did_it(log: Log) -> None:
    async with logged_rig(log, num_prefill=2) as rig:
        rig.prefills[0].faults_to_come = [Fault.ERROR_500]
        for _ in range(2):
            assert (await ask(rig)).status == 200
    (line,) = [line for line in log.lines if line["failures"]]
    assert some(line, "prefill_attempts", "prefill_engine", "outcome") == (2, "prefill-1", "ok")
    assert line["failures"] == ["prefill_failed"]


async def test_a_prefill_that_fails_for_good_is_told(log: Log) -> None:
    async with logged_rig(log) as rig:
        rig.prefill.fault = Fault.ERROR_500
        assert (await ask(rig)).status == 502
    line = log.line
    assert some(line, "status", "outcome") == (502, "engine_error")
    assert line["failures"] == ["prefill_failed", "prefill_exhausted"]


async def test_another_decode_engine_is_counted(log: Log) -> None:
    async with logged_rig(log, num_decode=2) as rig:
        rig.decodes[0].faults_to_come = [Fault.DIE]
        rig.decodes[1].faults_to_come = [Fault.DIE]
        assert (await ask(rig)).status == 502
    line = log.line
    assert some(line, "status", "outcome", "decode_attempts") == (502, "lost", 2)
    assert line["failures"] == ["decode_lost", "decode_lost"]
    assert line["decode_engine"].startswith("decode-")


@pytest.mark.parametrize("fault", [Fault.DIE_MID_STREAM, Fault.ERROR_MID_STREAM, Fault.GIVE_UP])
async def test_a_stream_that_breaks_off_has_its_status_and_is_lost(log: Log, fault: Fault) -> None:
    async with logged_rig(log) as rig:
        rig.decode.fault = fault
        assert not (await ask(rig, STREAM)).is_whole
    line = log.line
    assert some(line, "status", "outcome", "failures") == (200, "lost", ["decode_lost"])
    assert line["bytes_out"] > 0


async def test_decodes_own_refusal_is_told(log: Log) -> None:
    async with logged_rig(log) as rig:
        rig.decode.fault = Fault.ERROR_404
        assert (await ask(rig, PROMPT)).status == 404
    assert some(log.line, "status", "outcome", "model", "failures") == (404, "engine_error", "m", [])


async def test_a_client_that_leaves_has_no_status(log: Log) -> None:
    async with logged_rig(log) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefill.next_request()
        client.leave()
        await rig.settled()
    line = log.line
    assert some(line, "status", "outcome", "failures") == (None, "client_gone", ["client_gone"])
    assert some(line, "prefill_engine", "bytes_out", "first_byte_s") == ("prefill-0", 0, None)


async def test_a_client_that_leaves_in_a_stream_has_had_its_status(log: Log) -> None:
    async with logged_rig(log) as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, STREAM)
        await client.reader.readuntil(b"Hello")
        client.leave()
        await rig.settled()
    assert some(log.line, "status", "outcome", "events") == (200, "client_gone", 1)


async def test_a_client_that_leaves_before_its_body_is_whole_is_told(log: Log) -> None:
    async with logged_rig(log) as rig:
        client = await rig.client()
        await client.send(raw()[:-1])
        await until(lambda: rig.router.room.used_bytes > len(json.dumps(PROMPT)))
        client.leave()
        await until(lambda: not rig.router.room.used_bytes)
    line = log.line
    assert some(line, "status", "outcome", "read_s", "model") == (None, "client_gone", None, "")
    assert line["bytes_in"] == len(json.dumps(PROMPT)) - 1


# Comments.


async def test_keep_alives_are_no_part_of_the_answer(log: Log) -> None:
    async with logged_rig(log, keep_alive_s=0.1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, STREAM)
        await until(lambda: rig.router.keep_alives.num_comments >= 2)
        rig.prefill.open_gate(Gate.PREFILL)
        answer = await asyncio.wait_for(client.receive(), PATIENCE_S)
    line = log.line
    assert line["bytes_out"] == len(answer.body.replace(COMMENT, b"")) < len(answer.body)
    assert line["first_byte_s"] > 0.1
    assert line["gap_max_s"] <= line["total_s"] - line["first_byte_s"] + 2e-6, "each is rounded to a microsecond"
    assert some(line, "status", "events", "outcome") == (200, 4, "ok")


async def test_an_error_behind_keep_alives_is_an_outcome_under_status_200(log: Log) -> None:
    async with logged_rig(log, keep_alive_s=0.1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, STREAM)
        await until(lambda: rig.router.keep_alives.num_comments >= 1)
        rig.decode.fault = rig.prefill.fault = Fault.ERROR_500
        await rig.prefill.stop()
        assert not (await asyncio.wait_for(client.receive(), PATIENCE_S)).is_whole
    assert some(log.line, "status", "outcome") == (200, "engine_error")
