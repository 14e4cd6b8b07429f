"""Everything that breaks ends in one clear error, on time, and nothing of it is left."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fakes.answers import STREAM_HEAD, chunk
from fakes.engine import FakeEngine
from fakes.faults import Fault, Gate
from fakes.http import Message, request_bytes
from fakes.reservations import reservation_call, reservation_of
from fakes.router import BOTH, COMPLETIONS, PROMPT, STREAM, Rig, params_of, post, running_rig, send, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("running_clock")]


def error_of(answer: Message) -> dict[str, object]:
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer.is_whole
    return error


# Prefill.


@BOTH
@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.ERROR_TEXT, Fault.DIE, Fault.NOT_HTTP])
async def test_a_failed_prefill_ends_as_one_http_error_that_says_why(
    rig: Rig, fault: Fault, body: dict[str, object]
) -> None:
    rig.prefill.fault = fault
    answer = await post(rig, body)
    assert answer.status == 502
    error = error_of(answer)
    assert error["code"] == "prefill_failed"
    assert "prefill-0" in str(error["message"])
    assert "127.0.0.1" not in answer.body.decode()
    outcome = rig.decode.seen[0].outcome
    assert outcome is not None
    assert (outcome["status"], outcome["action"]) == ("failed", "recompute")
    assert "prefill-0" in outcome["reason"]
    assert await rig.failures() == {"prefill_failed": 1, "prefill_exhausted": 1}


@BOTH
async def test_decode_may_recompute_when_prefill_fails(rig: Rig, body: dict[str, object]) -> None:
    rig.prefill.fault, rig.decode.fault = Fault.ERROR_500, Fault.RECOMPUTE
    answer = await post(rig, body)
    assert answer.status == 200
    assert len(rig.decode.seen) == len(rig.prefill.seen) == 1


@BOTH
async def test_a_prefill_engine_that_refuses_connections_fails_the_prefill_at_once(
    rig: Rig, body: dict[str, object]
) -> None:
    await rig.prefill.stop()
    assert (await post(rig, body)).status == 502
    outcome = rig.decode.seen[0].outcome
    assert outcome is not None
    assert "cannot connect" in outcome["reason"]


async def test_a_prefill_that_hangs_is_aborted_after_its_timeout_and_decode_goes_on() -> None:
    async with running_rig(prefill_timeout_s=1.0) as rig:
        rig.prefill.fault, rig.decode.fault = Fault.HANG, Fault.RECOMPUTE
        answer = await post(rig, PROMPT)
        assert answer.status == 200
        await rig.prefill.seen[0].ended.wait()
        assert rig.prefill.seen[0].is_disconnected


# Decode.


@BOTH
@pytest.mark.parametrize(("fault", "status"), [(Fault.ERROR_500, 500), (Fault.ERROR_404, 404), (Fault.ERROR_TEXT, 500)])
async def test_decodes_error_is_relayed_in_openais_shape(
    rig: Rig, fault: Fault, status: int, body: dict[str, object]
) -> None:
    rig.decode.fault = fault
    answer = await post(rig, body)
    assert answer.status == status
    error_of(answer)
    assert rig.prefill.seen == []


@BOTH
@pytest.mark.parametrize("fault", [Fault.DIE, Fault.EMPTY_200, Fault.NOT_HTTP])
async def test_a_decode_that_does_not_answer_is_one_502(rig: Rig, fault: Fault, body: dict[str, object]) -> None:
    rig.decode.fault = fault
    answer = await post(rig, body)
    assert answer.status == 502
    assert error_of(answer)["code"] == "decode_lost"
    assert len(rig.decode.seen) == 1


async def test_an_unasked_second_response_is_dropped_with_its_connection(rig: Rig) -> None:
    rig.decode.fault = Fault.TOO_MUCH
    for _ in range(2):
        answer = await post(rig, PROMPT)
        assert answer.json() == {"n": 1}
    assert rig.decode.num_connections == 2


async def test_a_decode_that_dies_mid_stream_is_an_error_event_and_a_cut(rig: Rig) -> None:
    rig.decode.fault = Fault.DIE_MID_STREAM
    answer = await post(rig, STREAM)
    assert answer.status == 200
    assert not answer.is_whole
    first, last = answer.chunks[0], answer.chunks[1]
    assert first == rig.decode.events(rig.decode.seen[0])[0]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "decode_lost"
    assert b"127.0.0.1" not in last
    assert await rig.metric('pdcluster_router_requests_total{outcome="lost"}') == 1


async def test_an_error_event_in_the_middle_of_a_stream_is_not_followed_by_a_clean_end(rig: Rig) -> None:
    rig.decode.fault = Fault.ERROR_MID_STREAM
    answer = await post(rig, STREAM)
    assert answer.status == 200
    assert not answer.is_whole
    first, last = answer.chunks[0], answer.chunks[1]
    assert first == rig.decode.events(rig.decode.seen[0])[0]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["code"], "EngineCore died" in error["message"]) == ("decode_lost", True)
    assert b"[DONE]" not in b"".join(answer.chunks)


async def test_an_answer_that_its_engine_has_given_up_is_none(rig: Rig) -> None:
    rig.decode.fault = Fault.GIVE_UP
    answer = await post(rig, PROMPT)
    assert (answer.status, error_of(answer)["code"]) == (502, "decode_lost")


async def test_a_stream_of_half_an_error_is_no_answer() -> None:
    half = chunk(b'data: {"error": {"message": "core died", "code": 500}}\n')
    async with running_rig() as rig:
        rig.decode.fault, rig.decode.raw = Fault.RAW, STREAM_HEAD + half + b"0\r\n\r\n"
        answer = await post(rig, STREAM)
        assert answer.status >= 500 or not answer.is_whole
        assert b'"decode_lost"' in (b"".join(answer.chunks) or answer.body)


@pytest.mark.parametrize("gap_s", [0.0, 0.05])
async def test_a_stream_that_its_engine_has_given_up_does_not_end_well(rig: Rig, gap_s: float) -> None:
    rig.decode.fault, rig.decode.token_s = Fault.GIVE_UP, gap_s
    answer = await post(rig, STREAM)
    told = b"".join(answer.chunks) or answer.body
    assert b'"decode_lost"' in told
    assert b"abort" not in told
    assert b"[DONE]" not in told


@BOTH
async def test_a_decode_that_hangs_ends_in_a_504_and_both_engines_are_let_go(body: dict[str, object]) -> None:
    async with running_rig(request_timeout_s=1.0) as rig:
        rig.decode.fault = Fault.HANG
        answer = await post(rig, body)
        assert answer.status == 504
        assert error_of(answer)["code"] == "deadline_passed"
        await rig.decode.seen[0].ended.wait()
        assert rig.decode.seen[0].is_disconnected


@BOTH
async def test_the_clients_own_deadline_ends_a_request_during_prefill(rig: Rig, body: dict[str, object]) -> None:
    rig.prefill.fault = Fault.HANG
    answer = await post(rig, body, {"x-request-timeout": "1"})
    assert answer.status == 504
    await rig.prefill.seen[0].ended.wait()
    assert rig.prefill.seen[0].is_disconnected
    await rig.decode.seen[0].ended.wait()


async def test_a_stream_that_passes_its_deadline_is_an_error_event_and_a_cut() -> None:
    async with running_rig(request_timeout_s=1.0) as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        answer = await post(rig, STREAM)
        assert answer.status == 200
        assert not answer.is_whole
        assert b'"deadline_passed"' in answer.chunks[1]
        assert await rig.metric('pdcluster_router_requests_total{outcome="timeout"}') == 1


async def test_a_prefill_that_failed_does_not_leave_a_decode_that_waits_for_ever() -> None:
    async with running_rig(request_timeout_s=1.0) as rig:
        rig.prefill.fault, rig.decode.fault = Fault.ERROR_500, Fault.NONE
        rig.decode.fault = Fault.IGNORE_OUTCOME
        answer = await post(rig, PROMPT)
        assert answer.status == 504
        await rig.decode.seen[0].ended.wait()


async def test_no_reservation_in_time_ends_the_request() -> None:
    async with running_rig(reservation_timeout_s=0.1) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        assert (await post(rig, STREAM)).status == 504


# Reaching decode.


async def test_no_decode_engine_is_a_503_that_says_when_to_come_back() -> None:
    async with running_rig(num_decode=2) as rig:
        for engine in rig.decodes:
            await engine.stop()
        answer = await post(rig, PROMPT)
        assert answer.status == 503
        assert error_of(answer)["code"] == "no_decode_engine"
        assert int(answer.headers["retry-after"]) > 0
        assert "127.0.0.1" not in answer.body.decode()


@BOTH
async def test_another_decode_engine_is_tried_when_one_cannot_be_reached(body: dict[str, object]) -> None:
    async with running_rig(num_decode=2) as rig:
        await rig.decodes[0].stop()
        for _ in range(2):
            assert (await post(rig, body)).status == 200
        assert len(rig.decodes[1].seen) == 2


@BOTH
async def test_a_stale_idle_connection_to_decode_is_replaced_under_a_new_transfer_id(
    rig: Rig, body: dict[str, object]
) -> None:
    client = await rig.client()
    assert (await client.get("/health")).status == 200
    rig.decode.hang_up_on_all()
    rig.feed(client, request_bytes(COMPLETIONS, json.dumps(body).encode()))
    (old,) = rig.router.services.transfers
    assert (await client.receive()).status == 200
    assert len(rig.decode.seen) == 1
    assert (rig.decode.seen[0].params or {})["transfer_id"] != old
    assert await rig.metric("pdcluster_router_decode_resent_total") == 1


async def test_a_stale_idle_connection_to_the_last_decode_engine_is_replaced_though_it_is_not_ready_any_more(
    rig: Rig,
) -> None:
    roster, client = rig.router.services.roster, await rig.client()
    assert (await client.get("/health")).status == 200
    rig.decode.hang_up_on_all()
    rig.feed(client, request_bytes(COMPLETIONS, json.dumps(PROMPT).encode()))
    roster.update([replace(member, is_ready=False) for member in roster.members])
    assert (await client.receive()).status == 200


async def test_a_stale_idle_connection_to_prefill_is_replaced(rig: Rig) -> None:
    rig.decode.fault = Fault.GO_ON_AFTER_PUSH
    rig.decode.close_gate(Gate.RESERVE)
    client = await send(rig)
    seen = await rig.decode.next_request()
    metaserver = await rig.internal()
    await until(lambda: len(rig.server.server_state.connections) == 2)
    rig.prefill.hang_up_on_all()
    rig.feed(metaserver, reservation_call(reservation_of(seen.params or {})))
    assert (await metaserver.receive()).json()["status"] == "ok"
    assert len(rig.prefill.seen) == 1
    client.leave()


async def test_an_engine_that_read_the_request_before_it_hung_up_is_not_asked_again(rig: Rig) -> None:
    client = await rig.client()
    assert (await client.post(COMPLETIONS, PROMPT)).status == 200
    rig.decode.fault = Fault.DIE
    assert (await client.post(COMPLETIONS, PROMPT)).status == 502
    assert len(rig.decode.seen) == 2


async def test_a_connection_lost_after_the_reservation_is_no_stale_one(rig: Rig) -> None:
    client = await rig.client()
    assert (await client.post(COMPLETIONS, PROMPT)).status == 200
    rig.prefill.close_gate(Gate.PREFILL)
    await client.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode()))
    seen = [await rig.prefill.next_request() for _ in range(2)][1]
    await rig.decode.stop()
    answer = await client.receive()
    assert answer.status == 502
    await seen.ended.wait()
    assert seen.is_disconnected


async def test_an_engine_whose_connections_are_all_in_use_is_unavailable() -> None:
    async with running_rig(max_engine_connections=1) as rig:
        rig.decode.fault = Fault.HANG
        first = await rig.client()
        await first.send(request_bytes(COMPLETIONS, b"{}"))
        await rig.decode.next_request()
        answer = await post(rig, PROMPT)
        assert answer.status == 503
        assert "1 connections are in use" in str(error_of(answer)["message"])
        first.leave()


async def test_an_engine_that_comes_back_is_used_again(rig: Rig) -> None:
    port = int(rig.decode.url.rpartition(":")[2])
    await rig.decode.stop()
    assert (await post(rig, PROMPT)).status == 503
    rig.decodes[0] = FakeEngine(rig.prefill.wire)
    await rig.decode.start(port)
    assert (await post(rig, PROMPT)).status == 200


# The metaserver.


async def test_a_reservation_for_an_unknown_transfer_is_refused(rig: Rig) -> None:
    answer = await rig.reserve(reservation_of(params_of()))
    assert answer.status == 404
    assert answer.json()["status"] == "failed"


async def test_a_reservation_for_an_ended_transfer_is_refused(rig: Rig) -> None:
    await post(rig, PROMPT)
    await rig.settled()
    params = rig.decode.seen[0].params
    assert params is not None
    answer = await rig.reserve(reservation_of(params))
    assert answer.status == 404


@pytest.mark.parametrize("body", [b"", b"nope", b"[]", b"{}", b'{"version": 1}', b'{"version": 99}'])
async def test_what_is_no_reservation_is_refused(rig: Rig, body: bytes) -> None:
    answer = await rig.reserve(body)
    assert answer.status == 400
    assert answer.json()["status"] == "failed"


async def test_the_same_reservation_twice_shares_one_prefill_and_one_outcome(rig: Rig) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig)
    await rig.prefill.next_request()
    params = rig.decode.seen[0].params
    assert params is not None
    again = await rig.internal()
    await again.send(reservation_call(reservation_of(params)))
    other = await rig.reserve(reservation_of(params, remote_block_ids=[[9]]))
    assert other.json()["status"] == "failed"
    rig.prefill.open_gate(Gate.PREFILL)
    assert (await again.receive()).json()["status"] == "ok"
    assert (await client.receive()).status == 200
    assert len(rig.prefill.seen) == 1


async def test_a_decode_that_hangs_up_on_the_metaserver_stops_its_prefill(rig: Rig) -> None:
    rig.decode.fault = Fault.HANG_UP_ON_METASERVER
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig)
    order = await rig.prefill.next_request()
    rig.decode.hang_up.set()
    await order.ended.wait()
    assert order.is_disconnected
    assert (await client.receive()).status == 500


@pytest.mark.parametrize("half", [b"da", b'data: {"id":', b"data: {}\n", b": pi"])
async def test_behind_a_part_of_an_event_an_error_is_an_event_of_its_own(half: bytes) -> None:
    async with running_rig(idle_timeout_s=0.4) as rig:
        whole = b'data: {"choices":[{"text":"a"}]}\n\n'
        rig.decode.fault, rig.decode.raw = Fault.RAW, STREAM_HEAD + chunk(whole) + chunk(half)
        answer = await post(rig, STREAM)
        *_, last, nothing = b"".join(answer.chunks).split(b"\n\n")
        assert nothing == b""
        assert json.loads(last.strip().removeprefix(b"data: "))["error"]["code"] == "stalled"
