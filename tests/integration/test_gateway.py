"""A real Envoy asks the router which engines get a request: its clients get what the router's own clients get."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from grpc import aio

from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.router import BOTH, CHAT, COMPLETIONS, PROMPT, STREAM, Rig, orders, post, running_rig, until
from gateway.envoy import SUBSET_HEADER, Envoy, running_envoy
from integration.ports import fresh_port
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

MODES: Final[dict[str, dict[str, str]]] = {
    "duplex": {},
    "unread": {"response_body_mode": "NONE"},
    "buffered": {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"},
}
EACH_MODE: Final = pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
MESSAGES: Final = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "once"}]}


@dataclass
class Gatewayed:
    """A router with engines, and an Envoy before it."""

    rig: Rig
    envoy: Envoy

    async def both(self, body: object, path: str = COMPLETIONS, **headers: str) -> tuple[Message, Message]:
        """The answer through the gateway, and the router's own."""
        async with asyncio.timeout(PATIENCE_S):
            own = await (await self.rig.client()).post(path, body, headers)
        return await self.envoy.ask(body, path, headers), own


@asynccontextmanager
async def gateway(
    modes: dict[str, str] | None = None,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    envoy: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Gatewayed]:
    """At the end of a test that has passed nothing of any request is left in the router."""
    settings["picker_port"] = port = fresh_port()
    async with running_rig(num_prefill=num_prefill, num_decode=num_decode, **settings) as rig:
        urls = [engine.url for engine in rig.decodes]
        async with running_envoy(port, urls, **(modes or {}), **(envoy or {})) as running:
            yield Gatewayed(rig, running)
            for client in rig.clients:
                client.leave()
            await until(lambda: rig.router.clients.num_open == 0)


def require_same(through: Message, own: Message) -> None:
    assert (through.status, through.body, through.is_whole) == (own.status, own.body, own.is_whole)
    assert through.headers["content-type"] == own.headers["content-type"]
    assert through.headers.get("retry-after") == own.headers.get("retry-after")


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
    ],
    ids=["chat", "messages", "messages stream", "decode alone"],
)
async def test_each_api_is_served(modes: dict[str, str], path: str, body: dict[str, Any]) -> None:
    async with gateway(modes) as both:
        require_same(*await both.both(body, path))


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
    async with gateway(idle_timeout_s=0.4) as both:
        both.rig.decode.close_gate(Gate.SECOND_TOKEN)
        through, own = await asyncio.gather(both.envoy.ask(STREAM), post(both.rig, STREAM))
        assert (through.is_whole, own.is_whole) == (False, False)
        assert through.chunks[-2] == own.chunks[-2]
        assert b'"code": "stalled"' in through.body or b'"code":"stalled"' in through.body


@EACH_MODE
async def test_the_requests_own_deadline_ends_it(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        both.rig.decode.fault = Fault.HANG
        answer = await both.envoy.ask(PROMPT, headers={"x-request-timeout": "0.2"})
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


async def test_only_an_engine_of_the_subset_is_picked() -> None:
    async with gateway(num_decode=3, envoy={"has_subsets": True}) as both:
        second = both.rig.decodes[1]
        for _ in range(6):
            subset = {SUBSET_HEADER: f"10.9.9.9:1, {second.url.removeprefix('http://')}"}
            assert (await both.envoy.ask(PROMPT, headers=subset)).status == 200
        assert len(second.seen) == 6
        gone = await both.envoy.ask(PROMPT, headers={SUBSET_HEADER: "10.9.9.9:1"})
        assert (gone.status, gone.json()["error"]["code"]) == (503, "no_decode_engine")
        models = await _get(both, "/v1/models", {SUBSET_HEADER: "10.9.9.9:1"})
        assert models.status == 503


async def _get(both: Gatewayed, path: str, headers: dict[str, str] | None = None) -> Message:
    client = await both.envoy.client()
    await client.send(request_bytes(path, b"", headers, method="GET"))
    async with asyncio.timeout(PATIENCE_S):
        return await client.receive()


@EACH_MODE
async def test_other_paths_go_to_a_decode_engine_as_they_are(modes: dict[str, str]) -> None:
    async with gateway(modes) as both:
        models = await _get(both, "/v1/models")
        assert (models.status, models.body) == (200, both.rig.decode.models)
        asked = await both.envoy.ask({"prompt": "a"}, "/v1/embeddings")
        assert asked.status == 200
        assert both.rig.decode.seen[-1].params is None
        assert both.rig.decode.seen[-1].message.path == "/v1/embeddings"
        wrong = await _get(both, COMPLETIONS)
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


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL"])
async def test_a_gateway_that_is_set_up_wrongly_is_told_the_cure(mode: str) -> None:
    async with gateway({"request_body_mode": mode, "request_trailer_mode": "SKIP"}) as both:
        answer = await both.envoy.ask(PROMPT)
        assert (answer.status, answer.json()["error"]["code"]) == (500, "bad_gateway_mode")
        assert f"request_body_mode is {mode}" in answer.json()["error"]["message"]
        assert (await _get(both, "/v1/models")).status == 200


async def test_a_client_that_sends_no_body_is_told_in_time() -> None:
    async with gateway(client_read_timeout_s=0.3) as both:
        client = await both.envoy.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{")
        async with asyncio.timeout(PATIENCE_S):
            answer = await client.receive()
        assert (answer.status, answer.json()["error"]["code"]) == (408, "client_too_slow")


async def test_keys_are_asked_for_and_stay_in_the_router(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(b'alice-key').hexdigest()}  alice\n")
    async with gateway(api_key_file=keys, engine_api_key="engines-own") as both:
        require_same(*await both.both(PROMPT))
        require_same(*await both.both(PROMPT, authorization="Bearer wrong"))
        require_same(*await both.both(PROMPT, authorization="Bearer alice-key"))
        assert [seen.message.headers["authorization"] for seen in both.rig.decode.seen] == ["Bearer engines-own"] * 2
        assert (await _get(both, "/v1/models")).status == 401
        assert (await _get(both, "/v1/models", {"x-api-key": "alice-key"})).status == 200
        assert both.rig.decode.list_headers["authorization"] == "Bearer engines-own"
        assert "x-api-key" not in both.rig.decode.list_headers


async def test_too_many_requests_at_a_time_are_told_so() -> None:
    async with gateway(max_connections=1) as both:
        both.rig.prefill.close_gate(Gate.PREFILL)
        first = await both.envoy.client()
        await first.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode()))
        await both.rig.prefill.next_request()
        answer = await both.envoy.ask(PROMPT)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "too_many_connections")
        both.rig.prefill.open_gate(Gate.PREFILL)
        assert (await first.receive()).status == 200


async def test_bodies_take_the_routers_common_room() -> None:
    async with gateway(max_buffered_bytes=1 << 20) as both:
        both.rig.prefill.close_gate(Gate.PREFILL)
        large = {**PROMPT, "prompt": "x" * 500_000}
        first = await both.envoy.client()
        await first.send(request_bytes(COMPLETIONS, json.dumps(large).encode()))
        await both.rig.prefill.next_request()
        answer = await both.envoy.ask(large)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_room")
        both.rig.prefill.open_gate(Gate.PREFILL)
        assert (await first.receive()).status == 200
        assert both.rig.router.room.used_bytes == 0


async def test_a_request_is_in_the_access_log_as_any(tmp_path: Path) -> None:
    async with gateway(access_log=tmp_path / "log", trusted_proxies=("127.0.0.0/8",)) as both:
        for body in (PROMPT, b"{", STREAM):
            await both.envoy.ask(body, headers={"x-request-id": "R-1", "x-forwarded-for": "192.0.2.7"})
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 400, 200]
    assert {line["request_id"] for line in lines} == {"R-1"}
    assert {line["client_address"] for line in lines} == {"192.0.2.7"}
    assert lines[0]["decode_engine"] == lines[2]["decode_engine"] == "decode-0"


async def test_probes_learn_whether_the_picker_is_ready() -> None:
    async with gateway() as both, aio.insecure_channel(f"127.0.0.1:{both.rig.router.settings.picker_port}") as channel:

        async def check(service: str) -> bytes:
            asked = b"" if not service else b"\x0a%c%b" % (len(service), service.encode())
            answer: bytes = await channel.unary_unary("/grpc.health.v1.Health/Check")(asked, timeout=PATIENCE_S)
            return answer

        ready = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        assert [await check(service) for service in ready] == [b"\x08\x01"] * 4
        with pytest.raises(aio.AioRpcError, match="NOT_FOUND"):
            await check("nothing")
        both.rig.router.drain()
        assert [await check(service) for service in ready] == [b"\x08\x01"] * 2 + [b"\x08\x02"] * 2


async def test_a_bug_of_ours_fails_one_request_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway() as both:
        with monkeypatch.context() as patch:
            patch.setattr(both.rig.router.services, "decode_params", _fails)
            answer = await both.envoy.ask(PROMPT)
        assert (answer.status, answer.json()["error"]["code"]) == (500, "internal_error")
        assert (await both.envoy.ask(PROMPT)).status == 200


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("a bug")
