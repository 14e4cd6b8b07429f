"""A real Envoy asks the router which engines get a request: its clients get what the router's own clients get."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import pytest

from fakes.faults import Fault, Gate
from fakes.http import RawClient, request_bytes
from fakes.responses import RESPONSES
from fakes.router import BOTH, CHAT, COMPLETIONS, PROMPT, STREAM, orders, post, until
from gateway.envoy import SUBSET_HEADER
from gateway.rig import EACH_MODE, MODES, gateway, get, require_same
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

MESSAGES: Final = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "once"}]}


@EACH_MODE
@BOTH
async def test_an_answer_is_byte_for_byte_the_routers_own(modes: dict[str, str], body: dict[str, Any]) -> None:
    async with gateway(modes) as both:
        require_same(*await both.both(body))
        by_client, by_gateway = both.rig.decode.seen
        assert by_gateway.params is not None
        assert by_gateway.params.keys() == (by_client.params or {}).keys()
        assert by_gateway.message.json().keys() == by_client.message.json().keys()
        assert len(orders(both.rig)) == 2


@EACH_MODE
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "once"}]}),
        ("/v1/messages", MESSAGES),
        ("/v1/messages", {**MESSAGES, "stream": True}),
        (COMPLETIONS, {**PROMPT, "echo": True}),
        ("/v1/embeddings", {"model": "m", "input": ["once", "upon"]}),
    ],
    ids=["chat", "messages", "messages stream", "decode alone", "pooling"],
)
async def test_each_api_is_served(modes: dict[str, str], path: str, body: dict[str, Any]) -> None:
    async with gateway(modes) as both:
        require_same(*await both.both(body, path))


@EACH_MODE
@BOTH
async def test_responses_are_served_where_the_router_sees_the_answer(
    modes: dict[str, str], body: dict[str, Any]
) -> None:
    asked = {"model": "m", "input": "once", "stream": body is STREAM}
    async with gateway(modes) as both:
        through, own = await both.both(asked, RESPONSES)
        if modes is MODES["unread"]:
            assert (through.status, through.json()["error"]["code"]) == (404, "responses_not_served")
            assert own.status == 200
        else:
            require_same(through, own)


async def test_hundreds_of_requests_side_by_side_get_equal_answers() -> None:
    async with gateway(num_prefill=2, num_decode=2) as both:
        for engine in both.rig.decodes:
            engine.is_parrot = True

        async def ask(url: str, number: int) -> list[bytes]:
            client = await RawClient.connect(url)
            bodies = []
            for turn in range(20):
                body = {"prompt": f"once {number} {turn} " + "x" * (number * 199 + turn), "stream": bool(turn % 2)}
                bodies.append((await client.post(COMPLETIONS, body, {"x-request-id": f"{number}-{turn}"})).body)
            client.leave()
            return bodies

        async with asyncio.timeout(PATIENCE_S):
            through = await asyncio.gather(*(ask(both.envoy.url, number) for number in range(16)))
            own = await asyncio.gather(*(ask(both.rig.url, number) for number in range(16)))
        assert through == own
        assert len({body for bodies in own for body in bodies}) == 320


@EACH_MODE
async def test_what_the_router_refuses_is_refused_with_its_own_words(modes: dict[str, str]) -> None:
    async with gateway(modes, max_body_bytes=4096) as both:
        for body in (b"{", b"[]", {"model": "unknown", "prompt": "a"}, b'{"prompt": "' + b"x" * 5000 + b'"}'):
            require_same(*await both.both(body))
        both.rig.router.drain()
        require_same(*await both.both(PROMPT))
        assert both.rig.decode.seen == []


async def test_a_full_queue_is_told_with_retry_after() -> None:
    async with gateway(max_prefill_backlog_tokens=1, max_queued_requests=0) as both:
        both.rig.prefill.close_gate(Gate.PREFILL)
        first = await both.envoy.client()
        await first.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode()))
        await both.rig.prefill.next_request()
        through, own = await both.both(PROMPT)
        assert (through.status, through.headers.get("retry-after")) == (429, own.headers.get("retry-after"))
        assert through.body == own.body
        both.rig.prefill.open_gate(Gate.PREFILL)
        assert (await first.receive()).status == 200


async def test_a_request_waits_in_the_routers_queue() -> None:
    async with gateway(max_prefill_backlog_tokens=1) as both:
        both.rig.prefill.close_gate(Gate.PREFILL)
        clients = [await both.envoy.client() for _ in range(3)]
        for client in clients:
            await client.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode()))
        await until(lambda: both.rig.router.services.num_queued == 2)
        clients[1].leave()
        await until(lambda: both.rig.router.services.num_queued == 1)
        both.rig.prefill.open_gate(Gate.PREFILL)
        assert [(await clients[number].receive()).status for number in (0, 2)] == [200, 200]


@EACH_MODE
async def test_a_client_that_leaves_ends_both_legs(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        both.rig.prefill.close_gate(Gate.PREFILL)
        client = await both.envoy.client()
        await client.send(request_bytes(COMPLETIONS, json.dumps(STREAM).encode()))
        order = await both.rig.prefill.next_request()
        client.leave()
        async with asyncio.timeout(PATIENCE_S):
            await order.ended.wait()
            await both.rig.decode.seen[0].ended.wait()
        assert order.is_disconnected
        assert both.rig.decode.seen[0].is_disconnected
        await both.rig.settled()  # Decode may hear of it from the gateway before the router does.
        assert (await both.rig.failures())["client_gone"] == 1


@EACH_MODE
async def test_a_client_that_leaves_mid_stream_ends_decode(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        both.rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await both.envoy.client()
        await client.send(request_bytes(COMPLETIONS, json.dumps(STREAM).encode()))
        await client.reader.readuntil(b"Hello")
        client.leave()
        async with asyncio.timeout(PATIENCE_S):
            await both.rig.decode.seen[0].ended.wait()


@EACH_MODE
@BOTH
async def test_another_prefill_engine_is_tried(modes: dict[str, str], body: dict[str, Any]) -> None:
    async with gateway(modes, num_prefill=2) as both:
        both.rig.prefills[0].faults_to_come = both.rig.prefills[1].faults_to_come = [Fault.ERROR_500]
        answer = await both.envoy.ask(body)
        assert answer.status == 200
        assert len(orders(both.rig)) == 2


@EACH_MODE
async def test_a_prefill_that_fails_is_the_routers_own_error(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        both.rig.prefill.fault = Fault.ERROR_500
        through, own = await both.both(PROMPT)
        require_same(through, own)
        assert through.json()["error"]["code"] == "prefill_failed"


async def test_an_error_event_at_a_streams_begin_becomes_a_status() -> None:
    async with gateway() as both:
        both.rig.prefill.fault = Fault.ERROR_500
        require_same(*await both.both(STREAM))


@EACH_MODE
async def test_decodes_own_error_goes_through(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        both.rig.decode.fault = Fault.ERROR_404
        require_same(*await both.both(PROMPT))


async def test_a_decode_engine_that_fails_is_one_error_in_the_apis_form() -> None:
    async with gateway(num_decode=2) as both:
        for engine in both.rig.decodes:
            engine.fault = Fault.DIE
        answer = await both.envoy.ask(PROMPT)
        assert answer.status == 503
        assert "decode engine answered 503" in answer.json()["error"]["message"]
        assert sum(len(engine.seen) for engine in both.rig.decodes) == 1


async def test_a_late_error_cuts_the_stream_after_an_error_event() -> None:
    async with gateway() as both:
        both.rig.decode.fault = Fault.ERROR_MID_STREAM
        through, own = await both.both(STREAM)
        assert not through.is_whole
        assert not own.is_whole
        assert through.body == own.body


async def test_a_stream_is_kept_alive_between_two_tokens_but_not_before_the_first() -> None:
    async with gateway(keep_alive_s=0.05) as both:
        both.rig.prefill.close_gate(Gate.PREFILL)
        both.rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await both.envoy.client()
        await client.send(request_bytes(COMPLETIONS, json.dumps(STREAM).encode()))
        await both.rig.prefill.next_request()
        await asyncio.sleep(0.5)  # Ten times as long as our own clients wait for a comment.
        both.rig.prefill.open_gate(Gate.PREFILL)
        async with asyncio.timeout(PATIENCE_S):
            begin = await client.reader.readuntil(b": keep-alive")
            both.rig.decode.open_gate(Gate.SECOND_TOKEN)
            await client.reader.readuntil(b"[DONE]")
        assert b"Hello" in begin


async def test_a_stream_that_stalls_ends_with_an_error_event_and_a_cut() -> None:
    async with gateway(idle_timeout_s=3.0) as both:
        both.rig.decode.close_gate(Gate.SECOND_TOKEN)
        through, own = await asyncio.gather(both.envoy.ask(STREAM), post(both.rig, STREAM))
        assert (through.is_whole, own.is_whole) == (False, False)
        assert through.chunks[-2] == own.chunks[-2]
        assert b'"code": "stalled"' in through.body or b'"code":"stalled"' in through.body


@EACH_MODE
async def test_the_requests_own_deadline_ends_it(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        both.rig.decode.fault = Fault.HANG
        answer = await both.envoy.ask(PROMPT, headers={"x-request-timeout": "2"})
        assert (answer.status, answer.json()["error"]["code"]) == (504, "deadline_passed")
        async with asyncio.timeout(PATIENCE_S):
            await both.rig.decode.seen[0].ended.wait()


@pytest.mark.parametrize("modes", [MODES["duplex"], MODES["unread"]], ids=["duplex", "unread"])
async def test_a_large_body_goes_through(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        prompt = "x" * (1 << 20)
        require_same(*await both.both({**PROMPT, "prompt": prompt}))
        assert [seen.body["prompt"] == prompt for seen in both.rig.decode.seen] == [True, True]


async def test_a_slow_client_slows_decode_down_and_the_answer_stays_whole() -> None:
    async with gateway() as both:
        both.rig.decode.padding = "y" * (4 << 20)
        client = await both.envoy.client()
        await client.send(request_bytes(COMPLETIONS, json.dumps(STREAM).encode()))
        await asyncio.sleep(0.3)  # Buffers fill up meanwhile.
        async with asyncio.timeout(PATIENCE_S):
            answer = await client.receive()
            own = await (await both.rig.client()).post(COMPLETIONS, STREAM)
        assert answer.body == own.body
        assert len(answer.body) > 4 << 20


async def test_a_client_that_takes_nothing_and_leaves_is_noticed() -> None:
    async with gateway() as both:
        both.rig.decode.padding = "y" * (16 << 20)
        client = await both.envoy.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport can
        await client.send(request_bytes(COMPLETIONS, json.dumps(STREAM).encode()))
        await both.rig.decode.next_request()
        await asyncio.sleep(0.5)  # All buffers on the way are full.
        client.leave()
        async with asyncio.timeout(PATIENCE_S):
            await both.rig.decode.seen[0].ended.wait()


async def test_only_an_engine_of_the_subset_is_picked() -> None:
    async with gateway(num_decode=3, envoy={"has_subsets": True}) as both:
        second = both.rig.decodes[1]
        for _ in range(6):
            subset = {SUBSET_HEADER: f"10.9.9.9:1, {second.url.removeprefix('http://')}"}
            assert (await both.envoy.ask(PROMPT, headers=subset)).status == 200
        assert len(second.seen) == 6
        gone = await both.envoy.ask(PROMPT, headers={SUBSET_HEADER: "10.9.9.9:1"})
        assert (gone.status, gone.json()["error"]["code"]) == (503, "no_decode_engine")
        models = await get(both, "/v1/models", {SUBSET_HEADER: "10.9.9.9:1"})
        assert models.status == 503


@EACH_MODE
async def test_questions_go_to_a_decode_engine_as_they_are_and_other_paths_nowhere(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        models = await get(both, "/v1/models")
        assert (models.status, models.body) == (200, both.rig.decode.models)
        asked = await both.envoy.ask({"messages": []}, "/v1/messages/count_tokens")
        own = await (await both.rig.client()).post("/v1/messages/count_tokens", {"messages": []})
        assert (asked.status, asked.json()["path"]) == (200, own.json()["path"])
        unknown = await both.envoy.ask({"prompt": "a"}, "/v1/audio/speech")
        assert (unknown.status, unknown.json()["error"]["code"]) == (404, "not_found")
        assert both.rig.decode.seen == []
        wrong = await get(both, COMPLETIONS)
        assert (wrong.status, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_engines_see_no_header_that_is_not_for_them() -> None:
    async with gateway() as both:
        headers = {"x-forwarded-for": "1.2.3.4", "x-request-timeout": "600", "x-mine": "yes", "x-request-id": "R-1"}
        through, _ = await both.both(PROMPT, **headers)
        by_client, by_gateway = both.rig.decode.seen
        seen, own = by_gateway.message.headers, by_client.message.headers
        assert seen["x-mine"] == own["x-mine"]
        assert not {"x-forwarded-for", "x-request-timeout"} & seen.keys()
        assert seen["x-request-id"] == "R-1"
        assert through.headers["x-request-id"] == "R-1"
