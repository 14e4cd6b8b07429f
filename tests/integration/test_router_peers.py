"""What other routers were measured or reported to do wrong, row by row, against this one: better than each of them.

| Case (measured on vllm-router PD, sglang-router PD, vllm-ascend's layerwise proxy) | here, or in |
|---|---|
| prefill answers 500 once | test_router_retries: a_prefill_that_fails_is_retried |
| prefill always 500 | test_router_retries: attempts_are_bounded, gets_one_502_at_once |
| client leaves during prefill | test_router_clients: stops_the_writer_and_decode |
| decode dies mid-stream | test_router_faults: is_an_error_event_and_a_cut |
| all engines down | test_router_faults: no_decode_engine_is_a_503 |
| malformed JSON | test_router_http: a_body_that_is_no_json_object_is_a_400 |
| 41 ms for three chunks, for want of TCP_NODELAY | test_router_http: small_writes_are_sent_at_once_on_both_sides |
| callbacks reach the wrong process | here |
| decode never looks at the callback's status | here, for a storm |

| Report (sglang, vllm, vllm-ascend, tokenspeed, kthena, dynamo) | here, or in |
|---|---|
| abort storm pins decode for 300 s per failed prefill | here |
| decode stuck for ever when prefill dies | test_router_faults: does_not_leave_a_decode_that_waits_for_ever |
| client disconnect does not release prefill | test_router_clients: leaves_during_prefill, and here for a storm |
| 200 with an empty body | test_router_faults: a_decode_that_does_not_answer_is_one_502 |
| fails from 1,400-2,000 connections | here |
| decode capacity held by requests that wait for prefill | test_router_admission: decode_hears_nothing |
| a deadline that starts only when decode has admitted | test_router_admission: what_is_left_of_the_deadline |
| a retry after bytes were written: interleaved duplicates | unit, test_pairing: after_the_first_byte |
| stale idle connections | test_router_faults: a_stale_idle_connection, and here for all at once |
| wrong cached_tokens | test_router_flow: the answer's bytes are decode's own |
| n > 1, prompt_logprobs | test_router_flow: what_has_to_be_served_as_a_whole |
| unauthenticated pairing ids fill the memory | here, and test_router_strangers |
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator

import pytest

from fakes.engine import FakeEngine
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient
from fakes.reservations import SECRET, reservation_call, reservation_of
from fakes.router import COMPLETIONS, PROMPT, STREAM, Rig, params_of, post, raw, running_rig, until
from patience import PATIENCE_S
from pdcluster_protocol.secret import make_secret
from pdcluster_router.front.server import RouterServer, listen

pytestmark = pytest.mark.anyio


def num_asked(engines: list[FakeEngine]) -> int:
    return sum(len(engine.seen) for engine in engines)


def error_of(answer: Message) -> dict[str, object]:
    assert answer.is_whole
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def all_released(engines: list[FakeEngine]) -> None:
    """No engine works on anything any more."""
    async with asyncio.timeout(PATIENCE_S):
        for engine in engines:
            for seen in engine.seen:
                await seen.ended.wait()


async def test_callbacks_reach_the_very_router_that_sent_the_request(rig: Rig) -> None:
    settings = rig.server.router.settings.model_copy(update={"port": 0, "internal_port": None})
    sockets, settings = listen(settings)
    other = RouterServer(settings, SECRET)
    await other.start(sockets)
    clients = [await RawClient.connect(url) for url in (rig.url, f"http://127.0.0.1:{settings.port}") * 20]
    answers = await asyncio.gather(*(client.post(COMPLETIONS, PROMPT) for client in clients))
    assert {answer.status for answer in answers} == {200}
    assert len({(seen.params or {})["metaserver"] for seen in rig.decode.seen}) == 2
    assert await rig.failures() == {}
    await other.shutdown(sockets)


# Storms.


async def test_an_abort_storm_releases_decode_and_prefill_at_once() -> None:
    async with running_rig(num_prefill=2, num_decode=2, max_prefill_backlog_tokens=1 << 20) as rig:
        for engine in rig.prefills:
            engine.close_gate(Gate.PREFILL)
        clients = [await rig.client() for _ in range(200)]
        for client in clients:
            await client.send(raw(STREAM))
        await until(lambda: num_asked(rig.prefills) == 200)
        began = time.monotonic()
        for client in clients:
            client.leave()
        await all_released([*rig.prefills, *rig.decodes])
        await rig.settled()
        assert time.monotonic() - began < PATIENCE_S  # All deadlines that could have ended it are no shorter.
        assert all(seen.is_disconnected for engine in rig.prefills for seen in engine.seen)
        assert await rig.failures() == {"client_gone": 200}
        for engine in rig.prefills:
            engine.open_gate(Gate.PREFILL)
        assert (await post(rig)).status == 200


async def test_a_storm_of_failed_prefills_pins_no_decode() -> None:
    async with running_rig(num_prefill=2, on_prefill_failure="fail", max_prefill_backlog_tokens=1 << 20) as rig:
        for engine in rig.prefills:
            engine.fault = Fault.ERROR_500
        rig.decode.fault = Fault.IGNORE_OUTCOME  # It would sit there for ever.
        began = time.monotonic()
        clients = [await rig.client() for _ in range(200)]
        answers = await asyncio.gather(*(client.post(COMPLETIONS, PROMPT) for client in clients))
        assert {answer.status for answer in answers} == {502}
        await all_released(rig.decodes)
        await rig.settled()
        assert time.monotonic() - began < PATIENCE_S  # All deadlines that could have ended it are no shorter.
        assert (len(rig.decode.seen), num_asked(rig.prefills)) == (200, 400)


async def test_idle_connections_that_all_went_stale_at_once_cost_no_request(rig: Rig) -> None:
    clients = [await rig.client() for _ in range(30)]
    for _ in range(3):
        answers = await asyncio.gather(*(client.post(COMPLETIONS, STREAM) for client in clients))
        assert {(answer.status, answer.is_whole) for answer in answers} == {(200, True)}
        rig.decode.hang_up_on_all()
        rig.prefill.hang_up_on_all()


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as the system lets us: here both ends of every connection are ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow  # 500 at once: test_router_clients
@pytest.mark.usefixtures("many_files")
async def test_2000_connections_with_a_stream_each() -> None:
    async with running_rig(num_prefill=2, num_decode=2, max_prefill_backlog_tokens=1 << 20) as rig:
        for engine in rig.decodes:
            engine.close_gate(Gate.SECOND_TOKEN)
        clients = [await rig.client() for _ in range(2000)]
        async with asyncio.timeout(PATIENCE_S):
            for client in clients:
                await client.send(raw(STREAM))
            for client in clients:
                await client.reader.readuntil(b"Hello")
            assert len(rig.router.services.running) == 2000
            for engine in rig.decodes:
                engine.open_gate(Gate.SECOND_TOKEN)
            for client in clients:
                assert (await client.reader.readuntil(b"0\r\n\r\n")).count(b"data: ") == 4
        await rig.settled()
        assert await rig.failures() == {}


async def test_pairing_ids_of_strangers_leave_nothing_in_memory(rig: Rig) -> None:
    client = await rig.internal()
    for index in range(300):
        forged = reservation_of({**params_of(f"guess-{index}"), "token": ""})
        await client.send(reservation_call(forged, make_secret("of another cluster")))
        assert (await client.receive()).status == 403
    assert not rig.router.services.transfers
    assert rig.prefill.seen == []
    assert await rig.failures() == {"bad_token": 300}
