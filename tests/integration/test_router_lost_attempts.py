"""Decode says that an attempt is lost: the next one is made while there is one, and the reply tells how it ended."""

from __future__ import annotations

import asyncio

import pytest

from fakes.faults import Fault, Gate
from fakes.router import COMPLETIONS, PROMPT, STREAM, attempts, lose, orders, outcome_of, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.params import Reservation
from pdcluster_router.requests.exchange import Exchange
from pdcluster_router.requests.request import LARGE_BODY_BYTES

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["plain", "stream"])
async def test_an_attempt_that_decode_finds_incomplete_after_ok_is_made_elsewhere(
    body: dict[str, object],
) -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.decode.num_losses = 1
        assert (await (await rig.client()).post(COMPLETIONS, body)).status == 200
        assert attempts(rig) == [1, 2]
        assert [len(engine.seen) for engine in rig.prefills] == [1, 1]
        assert await rig.failures() == {"attempt_lost": 1}


async def test_a_running_attempt_that_decode_gives_up_is_stopped_and_both_calls_wait_for_the_next() -> None:
    async with running_rig(num_prefill=2) as rig:
        for engine in rig.prefills:
            engine.close_gate(Gate.PREFILL)
        client = await send(rig)
        await until(lambda: len(orders(rig)) == 1)
        first = orders(rig)[0]
        call = await lose(rig, rig.decode.seen[0], 1)
        await asyncio.wait_for(first.ended.wait(), PATIENCE_S)
        assert first.is_disconnected
        await until(lambda: len(orders(rig)) == 2)
        for engine in rig.prefills:
            engine.open_gate(Gate.PREFILL)
        assert await outcome_of(call) == ("ok", "fail", "")
        assert (await client.receive()).status == 200
        assert rig.decode.seen[0].outcome_status == 200


async def test_a_call_about_an_older_attempt_just_waits_for_the_outcome() -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.prefills[0].fault = Fault.ERROR_500
        rig.prefills[1].close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefills[1].next_request()
        calls = [await lose(rig, rig.decode.seen[0], attempt) for attempt in (0, 1)]
        await until(lambda: len(rig.server.server_state.connections) >= 4)
        rig.prefills[1].open_gate(Gate.PREFILL)
        assert [await outcome_of(call) for call in calls] == [("ok", "fail", "")] * 2
        assert (await client.receive()).status == 200
        assert attempts(rig) == [1, 2]


@pytest.mark.parametrize("attempt", [2, 99])
async def test_an_attempt_that_was_never_made_cannot_be_lost(attempt: int) -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.prefills[0].close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefills[0].next_request()
        status, _, reason = await outcome_of(await lose(rig, rig.decode.seen[0], attempt))
        assert (status, reason) == ("failed", f"attempt {attempt} of this transfer was never made: the newest is 1")
        rig.prefills[0].open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200
        assert attempts(rig) == [1]


async def test_another_reservation_that_says_lost_changes_nothing() -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.prefills[0].close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefills[0].next_request()
        status, _, reason = await outcome_of(await lose(rig, rig.decode.seen[0], 1, remote_block_ids=[[9]]))
        assert (status, reason) == ("failed", "this transfer has another reservation already")
        rig.prefills[0].open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200
        assert await rig.failures() == {"reservation_refused": 1}


async def test_nothing_is_lost_any_more_once_the_client_has_the_first_byte() -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, STREAM)
        await client.reader.readuntil(b"Hello")
        status, action, reason = await outcome_of(await lose(rig, rig.decode.seen[0], 1))
        assert (status, action, reason) == ("failed", "recompute", "decode's answer has begun already")
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        assert (await client.reader.readuntil(b"0\r\n\r\n")).count(b"data: ") == 4
        assert attempts(rig) == [1]


async def test_of_a_long_reservation_a_digest_stays_while_the_answer_flows() -> None:
    async with running_rig() as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, STREAM | {"prompt": "a" * 2 * LARGE_BODY_BYTES})
        await client.reader.readuntil(b"Hello")
        seen = rig.decode.seen[0]
        [transfer] = rig.router.services.transfers.values()
        assert isinstance(transfer, Exchange)
        await until(lambda: kept_blocks(transfer) == ((),))
        other = {"remote_block_ids": [[9]]}
        for changes, attempt, said in (
            ({}, 0, ("ok", "fail", "")),  # As vLLM may post it once more.
            ({}, 1, ("failed", "recompute", "decode's answer has begun already")),
            (other, 0, ("failed", "fail", "this transfer has another reservation already")),
            (other, 1, ("failed", "fail", "this transfer has another reservation already")),
        ):
            assert await outcome_of(await lose(rig, seen, attempt, **changes)) == said
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        assert (await client.reader.readuntil(b"0\r\n\r\n")).count(b"data: ") == 4


def kept_blocks(exchange: Exchange) -> tuple[tuple[int, ...], ...] | None:
    kept = exchange.calls.reservation
    return kept.remote_block_ids if isinstance(kept, Reservation) else None


async def test_lost_attempts_end_with_the_last_reason_and_no_address_in_it() -> None:
    async with running_rig(num_prefill=1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        rig.decode.fault = Fault.RECOMPUTE
        client = await send(rig)
        await rig.prefill.next_request()
        outcome = await outcome_of(await lose(rig, rig.decode.seen[0], 1))
        assert outcome == ("failed", "recompute", "rank 0 of <address> is silent")
        assert (await client.receive()).status == 200
        again = await outcome_of(await lose(rig, rig.decode.seen[0], 1)) if rig.router.services.transfers else None
        assert again in (None, outcome)


async def test_a_decode_that_cuts_its_call_may_still_ask_for_the_next_attempt() -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.decode.fault = Fault.HANG_UP_ON_METASERVER
        rig.decode.close_gate(Gate.RESERVE)
        for engine in rig.prefills:
            engine.close_gate(Gate.PREFILL)
        client = await send(rig)
        seen = await rig.decode.next_request()
        call = await lose(rig, seen, 0)
        await until(lambda: len(orders(rig)) == 1)
        call.leave()
        await asyncio.wait_for(orders(rig)[0].ended.wait(), PATIENCE_S)
        assert orders(rig)[0].is_disconnected
        again = await lose(rig, seen, 1)
        await until(lambda: len(orders(rig)) == 2)
        for engine in rig.prefills:
            engine.open_gate(Gate.PREFILL)
        assert await outcome_of(again) == ("ok", "fail", "")
        client.leave()
        await rig.settled()
        assert await rig.failures() == {"reservation_lost": 1, "attempt_lost": 1, "client_gone": 1}
