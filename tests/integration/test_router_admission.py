"""The queue before prefill: who waits costs decode nothing, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient
from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS
from fakes.router import PROMPT, STREAM, Rig, running_rig, send, until
from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.clients.admission import PASS_S
from pdcluster_router.core.engines.load import FIRST_ANSWER_TOKENS

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("running_clock")]

ONE: dict[str, Any] = {"max_prefill_backlog_tokens": 1}
"""One request at a time for each prefill engine."""


async def answer_of(client: RawClient) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await client.receive()


def code_of(answer: Message) -> str:
    return str(answer.json()["error"]["code"])


async def occupy(rig: Rig) -> RawClient:
    """A request that prefill works on until its gate is opened."""
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig)
    await rig.prefill.next_request()
    return client


async def queued(rig: Rig, number: int) -> None:
    await until(lambda: rig.router.services.num_queued == number)


async def test_decode_hears_nothing_of_a_request_that_would_only_wait_for_prefill() -> None:
    async with running_rig(**ONE) as rig:
        first = await occupy(rig)
        waiting = [await send(rig) for _ in range(3)]
        await queued(rig, 3)
        assert len(rig.decode.seen) == 1
        assert await rig.metric("pdcluster_router_queue_length") == 3
        assert await rig.metric("pdcluster_router_in_flight") == 4
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_of(client)).status for client in (first, *waiting)] == [200] * 4
        assert await rig.failures() == {}


async def test_requests_enter_in_the_order_in_which_they_came() -> None:
    async with running_rig(**ONE) as rig:
        first = await occupy(rig)
        clients = []
        for index in range(5):
            clients.append(await send(rig, {"prompt": f"p{index}"}))
            await queued(rig, index + 1)
        rig.prefill.open_gate(Gate.PREFILL)
        for client in (first, *clients):
            assert (await answer_of(client)).status == 200
        assert [seen.body["prompt"] for seen in rig.decode.seen[1:]] == [f"p{index}" for index in range(5)]


IMAGE = {"image_url": {"url": "data:image/png;base64," + "A" * 300_000}}
WITH_IMAGE = {"prompt": "x", "messages": [{"role": "user", "content": [{"type": "image_url", **IMAGE}]}]}
LONG = {"prompt": "long " * 20_000}


@pytest.mark.parametrize(("body", "number"), [(WITH_IMAGE, 6), (LONG, 4)], ids=["images", "long"])
async def test_images_and_long_prompts_that_may_be_cached_run_beside_each_other(
    rig: Rig, body: object, number: int
) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    clients = [await send(rig, body) for _ in range(number)]
    await until(lambda: len(rig.prefill.seen) == number)
    clients.append(await send(rig))
    await until(lambda: len(rig.prefill.seen) == number + 1)
    rig.prefill.open_gate(Gate.PREFILL)
    assert [(await answer_of(client)).status for client in clients] == [200] * (number + 1)


async def test_the_reservation_says_how_much_is_to_be_prefilled_and_makes_room() -> None:
    async with running_rig(max_prefill_backlog_tokens=4 * 1000) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        body = {"prompt": "x" * 4000}  # About 1000 tokens; decode says 42, 16 of them cached.
        clients = [await send(rig, body) for _ in range(6)]
        await until(lambda: len(rig.prefill.seen) == 6)
        assert rig.router.services.admissions.shared[Role.PREFILL].backlog_tokens == 6 * (42 - 16)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_of(client)).status for client in clients] == [200] * 6


async def test_what_decode_prefills_by_itself_is_counted_and_queued_too() -> None:
    # Beside other work twenty requests take seconds to come: two wait for longer than that.
    async with running_rig(**ONE, max_queued_requests=2, queue_timeout_s=4.0) as rig:
        rig.decode.close_gate(Gate.ANSWER)
        clients = [await send(rig, {"prompt": "x" * 400, "echo": True}) for _ in range(20)]
        answers = [asyncio.create_task(answer_of(client)) for client in clients]
        await until(lambda: sum(answer.done() for answer in answers) == 19)
        rig.decode.open_gate(Gate.ANSWER)
        assert sorted([(await answer).status for answer in answers]) == [200] + [429] * 17 + [503] * 2
        assert len(rig.decode.seen) == 1


async def test_what_decode_computes_for_want_of_a_prefill_engine_is_decodes_load(rig: Rig) -> None:
    rig.prefill.fault, rig.decode.fault = Fault.ERROR_500, Fault.RECOMPUTE
    rig.decode.work_s = 1.0
    client = await send(rig)
    decode = rig.router.services.admissions.shared[Role.DECODE]
    await until(lambda: decode.backlog_tokens == 42 - 16)
    assert (await answer_of(client)).status == 200


async def test_room_is_made_as_soon_as_prefill_is_over_while_decode_still_streams() -> None:
    async with running_rig(**ONE) as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        first = await send(rig, STREAM)
        await first.reader.readuntil(b"Hello")
        second = await send(rig, STREAM)
        await second.reader.readuntil(b"Hello")
        assert len(rig.decode.seen) == 2
        rig.decode.open_gate(Gate.SECOND_TOKEN)


async def test_what_needs_no_prefill_engine_does_not_wait() -> None:
    async with running_rig(**ONE) as rig:
        await occupy(rig)
        assert (await answer_of(await send(rig, {**PROMPT, "echo": True}))).status == 200
        rig.prefill.open_gate(Gate.PREFILL)


async def test_an_answer_without_a_reservation_gives_its_share_back_when_it_begins() -> None:
    async with running_rig(**ONE) as rig:
        rig.decode.fault = Fault.CACHED
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        first = await send(rig, STREAM)
        await first.reader.readuntil(b"Hello")
        assert rig.router.services.admissions.shared[Role.PREFILL].backlog_tokens == 0
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        await first.reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.DIE, Fault.HANG])
async def test_a_failed_prefill_gives_its_share_back(fault: Fault) -> None:
    async with running_rig(**ONE, prefill_timeout_s=0.1) as rig:
        rig.prefill.fault, rig.decode.fault = fault, Fault.RECOMPUTE
        clients = [await send(rig) for _ in range(4)]
        assert [(await answer_of(client)).status for client in clients] == [200] * 4


async def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    async with running_rig(**ONE, max_queued_requests=1) as rig:
        await occupy(rig)
        await send(rig)
        await queued(rig, 1)
        answer = await answer_of(await send(rig))
        assert (answer.status, code_of(answer)) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        assert await rig.failures() == {"queue_full": 1}
        assert await rig.metric('pdcluster_router_requests_total{outcome="overloaded"}') == 1
        assert len(rig.decode.seen) == 1
        rig.prefill.open_gate(Gate.PREFILL)


async def test_the_body_of_a_request_that_is_queued_takes_room() -> None:
    async with running_rig(**ONE) as rig:
        await occupy(rig)
        used = rig.router.room.used_bytes
        client = await send(rig, PROMPT | {"prompt": "a" * 1_000_000})
        await queued(rig, 1)
        assert rig.router.room.used_bytes - used > 1_000_000
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await answer_of(client)).status == 200
        await until(lambda: rig.router.room.used_bytes < used + 1_000)


async def test_without_a_queue_who_finds_no_room_is_told_at_once() -> None:
    async with running_rig(**ONE, max_queued_requests=0) as rig:
        await occupy(rig)
        assert (await answer_of(await send(rig))).status == 429
        rig.prefill.open_gate(Gate.PREFILL)


async def test_who_waited_too_long_is_a_503_that_says_when_to_come_back() -> None:
    async with running_rig(**ONE, queue_timeout_s=0.1) as rig:
        await occupy(rig)
        answers = [await answer_of(client) for client in [await send(rig) for _ in range(3)]]
        assert [(answer.status, code_of(answer)) for answer in answers] == [(503, "queue_timeout")] * 3
        assert all(answer.headers["retry-after"] == "1" for answer in answers)
        assert await rig.failures() == {"queue_timeout": 3}
        assert len(rig.decode.seen) == 1
        rig.prefill.open_gate(Gate.PREFILL)


async def test_the_requests_own_deadline_counts_while_it_waits() -> None:
    async with running_rig(**ONE) as rig:
        await occupy(rig)
        answer = await answer_of(await send(rig, PROMPT, **{"x-request-timeout": "0.1"}))
        assert (answer.status, code_of(answer)) == (504, "deadline_passed")
        assert "waiting to be admitted" in answer.json()["error"]["message"]
        assert await rig.failures() == {"deadline": 1}
        await queued(rig, 0)
        rig.prefill.open_gate(Gate.PREFILL)


async def test_a_hasty_request_behind_a_patient_one_is_told_in_its_own_time() -> None:
    async with running_rig(**ONE) as rig:
        await occupy(rig)
        await send(rig)
        await queued(rig, 1)
        hasty = await send(rig, PROMPT, **{"x-request-timeout": "0.1"})
        assert (await answer_of(hasty)).status == 504
        await queued(rig, 1)
        rig.prefill.open_gate(Gate.PREFILL)


async def test_a_hasty_request_is_told_in_its_own_time_also_when_others_wait_for_decode_alone() -> None:
    async with running_rig(**ONE) as rig:
        await occupy(rig)
        rig.decode.faults_to_come = [Fault.HANG]
        for number in range(2):  # Of requests that decode prefills one runs, and one waits.
            await send(rig, {**PROMPT, "echo": True})
            await queued(rig, number)
        hasty = [await send(rig, PROMPT, **{"x-request-timeout": seconds}) for seconds in ("0.1", "0.5")]
        assert [(await answer_of(client)).status for client in hasty] == [504, 504]
        await queued(rig, 1)
        for client in rig.clients:
            client.leave()


async def test_what_is_left_of_the_deadline_after_the_wait_is_what_decode_gets() -> None:
    async with running_rig(**ONE) as rig:
        await occupy(rig)
        waiting = await send(rig, PROMPT, **{"x-request-timeout": "50"})
        await queued(rig, 1)
        await rig.pass_time(0.2)
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await answer_of(waiting)).status == 200
        assert (rig.decode.seen[1].params or {})["deadline_ms"] <= 49_800


async def test_a_client_that_leaves_the_queue_is_forgotten_and_those_behind_it_move_up() -> None:
    async with running_rig(**ONE) as rig:
        first = await occupy(rig)
        leaving = await send(rig)
        await queued(rig, 1)
        staying = await send(rig)
        await queued(rig, 2)
        leaving.leave()
        await queued(rig, 1)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_of(client)).status for client in (first, staying)] == [200, 200]
        assert len(rig.decode.seen) == 2
        assert await rig.failures() == {"client_gone": 1}


async def test_those_behind_a_large_request_enter_when_its_client_leaves() -> None:
    running_tokens = 4 * (PROMPT_TOKENS - CACHED_TOKENS)
    async with running_rig(max_prefill_backlog_tokens=running_tokens + 16) as rig:  # No room for a quarter of that.
        rig.prefill.close_gate(Gate.PREFILL)
        for number in range(4):
            await send(rig)
            await until(lambda number=number: len(rig.prefill.seen) == number + 1)  # type: ignore[misc]  # bound now
        large = await send(rig, {"prompt": "x" * 4000})
        await queued(rig, 1)
        await rig.pass_time(PASS_S)
        await send(rig, {"prompt": "small"}, **{"x-request-timeout": f"{EDGE_S:g}"})  # The test's end if it stays.
        await queued(rig, 2)
        assert len(rig.prefill.seen) == 4  # Nobody passes who has waited for so long.
        large.leave()
        await queued(rig, 0)
        assert await rig.failures() == {"client_gone": 1}
        await until(lambda: len(rig.prefill.seen) == 5)
        rig.prefill.open_gate(Gate.PREFILL)


async def test_the_reservation_says_how_much_decode_has_to_do(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig, {"prompt": "x" * 4000})
    await rig.decode.next_request()
    (engine,) = rig.router.services.engines[Role.DECODE]
    assert engine.load.outstanding_tokens > FIRST_ANSWER_TOKENS + 900
    rig.decode.open_gate(Gate.RESERVE)
    await rig.prefill.next_request()
    assert engine.load.outstanding_tokens == FIRST_ANSWER_TOKENS + PROMPT_TOKENS
    rig.prefill.open_gate(Gate.PREFILL)
    assert (await answer_of(client)).status == 200


async def test_who_waits_while_the_router_drains_is_turned_away() -> None:
    async with running_rig(**ONE) as rig:
        first = await occupy(rig)
        waiting = await send(rig)
        await queued(rig, 1)
        rig.router.drain()
        answer = await answer_of(waiting)
        assert (answer.status, code_of(answer)) == (503, "draining")
        assert answer.headers["connection"] == "close"  # Its next request goes to another router.
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await answer_of(first)).status == 200


async def test_each_healthy_prefill_engine_adds_to_the_room() -> None:
    async with running_rig(num_prefill=3, **ONE, probe_interval_s=0.02) as rig:
        for engine in rig.prefills:
            engine.close_gate(Gate.PREFILL)
        clients = [await send(rig) for _ in range(6)]
        await queued(rig, 3)
        await until(lambda: sum(len(engine.seen) for engine in rig.prefills) == 3)
        for engine in rig.prefills[1:]:
            await engine.stop()
        await until(lambda: sum(engine.is_healthy for engine in rig.router.services.engines[Role.PREFILL]) == 1)
        rig.prefill.open_gate(Gate.PREFILL)
        statuses = [(await answer_of(client)).status for client in clients]
        assert statuses.count(200) == 6


async def test_an_attempt_that_is_made_again_counts_again_and_does_not_queue() -> None:
    async with running_rig(**ONE, num_prefill=2) as rig:
        rig.decode.num_losses = 1
        clients = [await send(rig) for _ in range(5)]
        assert [(await answer_of(client)).status for client in clients] == [200] * 5


async def test_many_that_wait_are_served_without_a_timer_each() -> None:
    async with running_rig(**ONE) as rig:
        first = await occupy(rig)
        clients = [await send(rig) for _ in range(300)]
        await queued(rig, 300)
        rig.prefill.open_gate(Gate.PREFILL)
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*(client.receive() for client in (first, *clients)))
        assert {answer.status for answer in answers} == {200}
        assert len(rig.decode.seen) == 301
