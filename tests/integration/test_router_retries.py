"""What fails before the client's first byte is tried elsewhere, and told once, with bounded effort."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from fakes.engine import FakeEngine
from fakes.faults import Fault, Gate
from fakes.http import Message
from fakes.reservations import reservation_of
from fakes.router import (
    BOTH,
    PROMPT,
    STREAM,
    Rig,
    attempts,
    lose,
    orders,
    outcome_of,
    post,
    running_rig,
    send,
    until,
)
from patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("running_clock")]


def code_of(answer: Message) -> str:
    return str(answer.json()["error"]["code"])


def break_all(engines: list[FakeEngine], fault: Fault) -> None:
    for engine in engines:
        engine.fault = fault


# Prefill.


@BOTH
@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.ERROR_404, Fault.DIE, Fault.NOT_HTTP, Fault.GIVE_UP])
async def test_a_prefill_that_fails_is_retried_on_another_engine_with_the_same_reservation(
    fault: Fault, body: dict[str, object]
) -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.prefills[0].fault = fault
        answer = await post(rig, body)
        assert (answer.status, answer.is_whole) == (200, True)
        first, second = (seen.params or {} for seen in orders(rig))
        assert (first["attempt"], second["attempt"]) == (1, 2)
        own = {"attempt", "token", "deadline_ms"}
        assert {k: v for k, v in first.items() if k not in own} == {k: v for k, v in second.items() if k not in own}
        assert first["token"] != second["token"]
        assert rig.decode.seen[0].outcome == {"status": "ok", "reason": "", "action": "fail", "attempt": 2}
        assert await rig.failures() == {"prefill_failed": 1}


async def test_a_prefill_engine_that_refuses_connections_is_passed_over() -> None:
    async with running_rig(num_prefill=2) as rig:
        await rig.prefills[0].stop()
        for _ in range(3):
            assert (await post(rig, PROMPT)).status == 200
        assert len(rig.prefills[1].seen) == 3


async def test_a_prefill_that_hangs_is_stopped_before_the_next_attempt_starts() -> None:
    async with running_rig(num_prefill=2, prefill_timeout_s=1.0) as rig:
        rig.prefills[0].fault = Fault.HANG
        assert (await post(rig, PROMPT)).status == 200
        await asyncio.wait_for(rig.prefills[0].seen[0].ended.wait(), PATIENCE_S)
        assert rig.prefills[0].seen[0].is_disconnected
        assert attempts(rig) == [1, 2]
        assert await rig.failures() == {"prefill_timeout": 1}


@pytest.mark.parametrize(("num_prefill", "expected"), [(1, 1), (2, 2), (3, 3), (5, 3)])
async def test_attempts_are_bounded_by_the_setting_and_by_the_engines_there_are(
    num_prefill: int, expected: int
) -> None:
    async with running_rig(num_prefill=num_prefill) as rig:
        break_all(rig.prefills, Fault.ERROR_500)
        answer = await post(rig, PROMPT)
        assert (answer.status, code_of(answer)) == (502, "prefill_failed")
        assert attempts(rig) == list(range(1, expected + 1))
        assert max(len(engine.seen) for engine in rig.prefills) == 1
        assert len(rig.decode.seen) == 1
        assert await rig.failures() == {"prefill_failed": expected, "prefill_exhausted": 1}


async def test_every_attempt_ends_within_the_requests_own_time() -> None:
    async with running_rig(num_prefill=3, prefill_timeout_s=1.5) as rig:
        break_all(rig.prefills, Fault.HANG)
        rig.decode.fault = Fault.RECOMPUTE
        answer = await post(rig, PROMPT, {"x-request-timeout": "2.9"})
        assert (answer.status, code_of(answer)) == (504, "deadline_passed")
        assert attempts(rig) == [1, 2]


# When nothing is left.


@BOTH
async def test_where_decode_shall_not_recompute_the_client_gets_one_502_at_once(body: dict[str, object]) -> None:
    async with running_rig(num_prefill=2, on_prefill_failure="fail") as rig:
        break_all(rig.prefills, Fault.ERROR_500)
        rig.decode.fault = Fault.IGNORE_OUTCOME  # It would never answer by itself.
        answer = await post(rig, body)
        assert (answer.status, code_of(answer)) == (502, "prefill_failed")
        assert "prefill-1 answered 500" in answer.json()["error"]["message"]
        await asyncio.wait_for(rig.decode.seen[0].ended.wait(), PATIENCE_S)
        assert rig.decode.seen[0].is_disconnected
        assert len(orders(rig)) == 2
        assert await rig.metric('pdcluster_router_requests_total{outcome="prefill_failed"}') == 1


async def test_decode_is_told_to_fail_where_it_shall_not_recompute() -> None:
    async with running_rig(on_prefill_failure="fail") as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefill.next_request()
        assert (await outcome_of(await lose(rig, rig.decode.seen[0], 1)))[:2] == ("failed", "fail")
        assert (await client.receive()).status == 502


# Decode.


@BOTH
@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.ERROR_503, Fault.ERROR_TEXT, Fault.DIE, Fault.EMPTY_200])
async def test_a_decode_that_fails_is_replaced_by_another_under_a_new_transfer_id(
    fault: Fault, body: dict[str, object]
) -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = fault
        answer = await post(rig, body)
        assert (answer.status, answer.is_whole) == (200, True)
        first, second = (engine.seen[0].params or {} for engine in rig.decodes)
        assert first["transfer_id"] != second["transfer_id"]
        assert first["token"] != second["token"]
        assert second["deadline_ms"] <= first["deadline_ms"]
        assert [seen.params["transfer_id"] for seen in orders(rig) if seen.params] == [second["transfer_id"]]


@BOTH
async def test_a_decode_that_dies_with_its_kv_is_replaced_and_the_prompt_prefilled_again(
    body: dict[str, object],
) -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = Fault.DIE_WITH_KV
        answer = await post(rig, body)
        expected = rig.decodes[1]
        whole = b"".join(expected.events(expected.seen[0])) if body is STREAM else expected.answer(expected.seen[0])
        assert (answer.status, answer.is_whole, answer.body) == (200, True, whole)
        assert attempts(rig) == [1, 1]
        assert await rig.failures() == {"decode_lost": 1}


async def test_an_answer_that_its_engine_has_given_up_comes_from_another_one() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = Fault.GIVE_UP
        answer = await post(rig, PROMPT)
        assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "stop")
        assert await rig.failures() == {"decode_lost": 1}


async def test_a_decode_that_dies_during_prefill_stops_the_writer_before_another_is_asked() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        order = await rig.prefill.next_request()
        await rig.decodes[0].stop()
        await asyncio.wait_for(order.ended.wait(), PATIENCE_S)
        assert order.is_disconnected
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200
        assert len(rig.decodes[1].seen) == 1


async def test_the_open_metaserver_call_of_a_lost_decode_is_answered_failed() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefill.next_request()
        call = await lose(rig, rig.decodes[0].seen[0], 0)
        await until(lambda: len(rig.server.server_state.connections) >= 3)
        await asyncio.sleep(0.05)
        await rig.decodes[0].stop()
        status, action, reason = await outcome_of(call)
        assert (status, action) == ("failed", "fail")
        assert "decode-0" in reason
        client.leave()


@BOTH
async def test_decodes_own_error_reaches_the_client_when_no_other_decode_helps(body: dict[str, object]) -> None:
    async with running_rig(num_decode=4) as rig:
        break_all(rig.decodes, Fault.ERROR_503)
        answer = await post(rig, body)
        assert (answer.status, answer.json()["error"]["message"]) == (503, "engine is overloaded")
        assert [len(engine.seen) for engine in rig.decodes] == [1, 1, 0, 0]
        assert await rig.failures() == {"decode_error": 2}


async def test_a_request_that_decode_calls_wrong_is_not_carried_to_another() -> None:
    async with running_rig(num_decode=2) as rig:
        break_all(rig.decodes, Fault.ERROR_404)
        assert (await post(rig, PROMPT)).status == 404
        assert sum(len(engine.seen) for engine in rig.decodes) == 1


async def test_a_request_whose_prefill_failed_for_good_is_not_carried_to_another_decode() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.prefill.fault = Fault.ERROR_500
        answer = await post(rig, PROMPT)
        assert (answer.status, code_of(answer)) == (502, "prefill_failed")
        assert sum(len(engine.seen) for engine in rig.decodes) == 1


async def test_a_decode_error_during_a_later_attempt_is_decodes_own_and_carried_to_another() -> None:
    async with running_rig(num_decode=2, num_prefill=2) as rig:
        rig.prefills[0].faults_to_come = [Fault.ERROR_500]
        rig.prefills[1].close_gate(Gate.PREFILL)
        rig.decodes[0].fault = Fault.HANG_UP_ON_METASERVER
        client = await send(rig)
        await rig.prefills[1].next_request()
        rig.decodes[0].hang_up.set()
        rig.prefills[1].open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200
        assert len(rig.decodes[1].seen) == 1


async def test_another_decode_is_told_why_no_prefill_is_left_for_it_and_may_recompute() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.prefill.fault = Fault.ERROR_500
        rig.decodes[0].fault = Fault.DIE_WITH_KV  # After it was told that there is none.
        rig.decodes[1].fault = Fault.RECOMPUTE
        assert (await post(rig, PROMPT)).status == 200
        outcome = rig.decodes[1].seen[0].outcome
        assert outcome is not None
        assert outcome["action"] == "recompute"
        assert "prefill-0 answered 500" in outcome["reason"]


async def test_another_decode_that_fails_for_want_of_a_prefill_is_not_to_blame() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.prefill.fault = Fault.ERROR_500
        rig.decodes[0].fault = Fault.DIE_WITH_KV
        answer = await post(rig, PROMPT)
        assert (answer.status, code_of(answer)) == (502, "prefill_failed")
        assert await rig.failures() == {"prefill_failed": 1, "prefill_exhausted": 2, "decode_lost": 1}


async def test_a_prefill_that_failed_for_one_decode_is_no_excuse_for_another() -> None:
    async with running_rig(num_decode=2, num_prefill=2, max_prefill_attempts=1) as rig:
        rig.prefills[0].fault = Fault.ERROR_500
        rig.decodes[0].fault, rig.decodes[1].fault = Fault.DIE_WITH_KV, Fault.ERROR_500
        answer = await post(rig, PROMPT)
        assert answer.status == 500
        assert b"engine says no" in answer.body


@BOTH
async def test_a_decode_that_prefills_by_itself_is_replaced_too(body: dict[str, object]) -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = Fault.ERROR_500
        answer = await post(rig, {**body, "echo": True})
        assert answer.status == 200
        assert orders(rig) == []


async def test_a_reservation_of_the_decode_that_was_left_is_a_404() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = Fault.ERROR_500
        rig.decodes[1].close_gate(Gate.RESERVE)
        client = await send(rig)
        await rig.decodes[1].next_request()
        answer = await rig.reserve(reservation_of(rig.decodes[0].seen[0].params or {}))
        assert (answer.status, answer.json()["status"]) == (404, "failed")
        rig.decodes[1].open_gate(Gate.RESERVE)
        assert (await client.receive()).status == 200


async def test_retries_share_the_requests_one_deadline() -> None:
    async with running_rig(num_decode=2, num_prefill=2) as rig:
        rig.decodes[0].faults_to_come = [Fault.ERROR_500]
        break_all(rig.prefills, Fault.HANG)
        answer = await post(rig, PROMPT, {"x-request-timeout": "0.3"})
        assert (answer.status, code_of(answer)) == (504, "deadline_passed")
        for seen in orders(rig):
            await asyncio.wait_for(seen.ended.wait(), PATIENCE_S)
            assert seen.is_disconnected


# What is told.


async def test_every_failure_is_one_line_with_the_same_keys_and_no_address_or_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running_rig(num_decode=2, num_prefill=2) as rig:
        rig.decodes[0].fault = Fault.DIE
        rig.prefills[0].fault = Fault.ERROR_500
        await rig.prefills[1].stop()
        assert (await post(rig, PROMPT, {"x-request-id": "R-1"})).status == 502
        await rig.reserve(reservation_of({**params(rig), "token": "1.abc"}))
        tokens = [(seen.params or {})["token"] for seen in (*rig.decodes[0].seen, *orders(rig))]
    lines = [message for message in caplog.messages if message.startswith("failure ")]
    keys = re.compile(r"failure kind=\w+ request_id=\S+ transfer_id=\S+ attempt=\d engine=[\w-]+ reason=.+")
    assert all(keys.fullmatch(line) for line in lines)
    kinds = [re.findall(r"kind=(\w+)", line)[0] for line in lines]
    assert sorted(kinds) == ["bad_token", "decode_lost", "prefill_exhausted", "prefill_failed", "prefill_failed"]
    assert sum("request_id=R-1 " in line for line in lines) == 4
    assert "127.0.0.1" not in caplog.text
    assert "once upon" not in caplog.text
    assert not any(token in caplog.text for token in tokens)


def params(rig: Rig) -> dict[str, Any]:
    found = rig.decodes[0].seen[0].params
    assert found is not None
    return found
