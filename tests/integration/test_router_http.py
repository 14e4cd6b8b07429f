"""The client side of HTTP: malformed, too large, pipelined, chunked, unknown; and the pages beside the hot paths."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from fakes.faults import Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.router import CHAT, COMPLETIONS, PROMPT, Rig, raw, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.front.server_protocol import RouterProtocol
from pdcluster_router.http.reading import MAX_HEADER_LINES

pytestmark = pytest.mark.anyio


def code_of(answer: Message) -> object:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


async def is_closed(client: RawClient) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        return await client.reader.read() == b""


# What is wrong with a request.


@pytest.mark.parametrize("body", [b"", b"{", b"nope", b"[1]", b'"x"', b"1", b"null", b'{"a": NaN}', b"\xff\xfe"])
async def test_a_body_that_is_no_json_object_is_a_400(rig: Rig, body: bytes) -> None:
    client = await rig.client()
    for _ in range(2):
        answer = await client.post(CHAT, body)
        assert (answer.status, code_of(answer)) == (400, "invalid_request")
    assert rig.decode.seen == []
    assert await rig.metric('pdcluster_router_requests_total{outcome="rejected"}') == 2


async def test_a_body_nested_too_deep_is_a_400(rig: Rig) -> None:
    answer = await (await rig.client()).post(CHAT, b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}")
    assert answer.status == 400


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
async def test_a_deadline_that_is_none_is_a_400(rig: Rig, value: str) -> None:
    answer = await (await rig.client()).post(COMPLETIONS, PROMPT, {"x-request-timeout": value})
    assert (answer.status, code_of(answer)) == (400, "invalid_timeout")


async def test_a_body_that_is_declared_too_large_is_a_413_before_it_is_read() -> None:
    async with running_rig(max_body_bytes=2000) as rig:
        client = await rig.client()
        await client.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 2001\r\n\r\n".encode())
        answer = await client.receive()
        assert (answer.status, code_of(answer)) == (413, "body_too_large")
        assert answer.headers["connection"] == "close"


async def test_a_chunked_body_that_grows_too_large_is_a_413_even_if_the_client_goes_on_sending() -> None:
    async with running_rig(max_body_bytes=2000) as rig:
        client = await rig.client()
        await client.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for _ in range(50):
            await client.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert (await client.receive()).status == 413
        await client.send(b"0\r\n\r\n")
        assert await is_closed(client)


@pytest.mark.parametrize("num_values", [1, 300])
async def test_huge_headers_are_a_431(num_values: int) -> None:
    async with running_rig(max_header_bytes=8192) as rig:
        client = await rig.client()
        headers = {f"x-{index}": "y" * (90_000 // num_values) for index in range(num_values)}
        await client.send(raw(PROMPT, **headers))
        answer = await client.receive()
        assert (answer.status, code_of(answer)) == (431, "headers_too_large")
        assert rig.decode.seen == []


@pytest.mark.parametrize("path", [COMPLETIONS, "/health"])
@pytest.mark.parametrize("end", [b"\r\n", b"a:\r\n" * 2], ids=["whole", "half"])
async def test_more_headers_than_any_client_sends_are_a_431(rig: Rig, path: str, end: bytes) -> None:
    # Some clients with 16,000 short lines each stopped the loop for 117 ms: the collector looked at all of them.
    head = f"POST {path} HTTP/1.1\r\ncontent-length: 0\r\nhost: a\r\n".encode()
    client = await rig.client()
    await client.send(head + b"a:\r\n" * (MAX_HEADER_LINES - 1) + end)
    answer = await client.receive()
    assert (answer.status, code_of(answer)) == (431, "too_many_headers")
    assert await is_closed(client)


async def test_as_many_headers_as_are_allowed_are_served(rig: Rig) -> None:
    client = await rig.client()
    await client.send(b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * (MAX_HEADER_LINES - 1) + b"\r\n")
    assert (await client.receive()).status == 200


async def test_a_header_that_never_ends_is_a_431() -> None:
    async with running_rig(max_header_bytes=8192) as rig:
        client = await rig.client()
        await client.send(f"POST {CHAT} HTTP/1.1\r\nx: ".encode() + b"y" * 10_000)
        assert (await client.receive()).status == 431


async def test_what_is_not_http_is_a_400(rig: Rig) -> None:
    client = await rig.client()
    await client.send(b"\x16\x03\x01\x02\x00\x01 hello\r\n\r\n")
    answer = await client.receive()
    assert (answer.status, code_of(answer)) == (400, "invalid_http")
    assert await is_closed(client)


async def test_a_request_with_both_length_and_chunks_is_refused(rig: Rig) -> None:
    client = await send(rig, PROMPT, **{"transfer-encoding": "chunked"})
    assert (await client.receive()).status == 400
    assert rig.decode.seen == []


async def test_a_request_that_does_not_arrive_whole_in_time_is_a_408(rig: Rig) -> None:
    client = await rig.served_client()
    rig.change_settings(client_read_timeout_s=0.2)
    await client.send(raw()[:-3])
    answer = await client.receive()
    assert (answer.status, code_of(answer)) == (408, "client_too_slow")
    assert await is_closed(client)


async def test_a_large_body_that_comes_steadily_may_take_longer_than_that(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is read within the turn in which it comes, so that a machine that stands still misses no limit."""
    looked, look = asyncio.Event(), RouterProtocol._read_too_slow

    def look_and_tell(connection: RouterProtocol) -> None:
        look(connection)
        looked.set()

    monkeypatch.setattr(RouterProtocol, "_read_too_slow", look_and_tell)
    client = await rig.served_client()
    rig.change_settings(client_read_timeout_s=0.2)
    large = raw({"prompt": "x" * 120_000})
    for part in (large[:1_000], large[1_000:60_000]):
        rig.feed(client, part)
    async with asyncio.timeout(PATIENCE_S):
        await looked.wait()
        rig.feed(client, large[60_000:])
        assert (await client.receive()).status == 200


async def test_a_connection_on_which_nothing_comes_is_closed() -> None:
    async with running_rig(client_read_timeout_s=0.1) as rig:
        assert await is_closed(await rig.client())


# What is right, but unusual.


async def test_one_connection_serves_many_requests_and_engines_see_kept_connections(rig: Rig) -> None:
    client = await rig.client()
    for _ in range(5):
        assert (await client.post(COMPLETIONS, PROMPT)).status == 200
    assert rig.decode.num_connections == rig.prefill.num_connections == 1  # The probe's, and kept.
    assert len(rig.decode.open_connections) == len(rig.prefill.open_connections) == 1


async def test_pipelined_requests_are_answered_in_order_hot_or_not(rig: Rig) -> None:
    client = await rig.client()
    bodies = [{"prompt": f"p{index}"} for index in range(20)]
    health = request_bytes("/health", b"", method="GET")
    await client.send(b"".join(raw(body) + health for body in bodies))
    for _ in bodies:
        assert json.loads((await client.receive()).body)["object"] == "text_completion"
        assert (await client.receive()).body == b'{"status":"ok"}'
    assert [seen.body["prompt"] for seen in rig.decode.seen] == [body["prompt"] for body in bodies]


async def test_many_pipelined_bad_requests_do_not_nest(rig: Rig) -> None:
    client = await rig.client()
    await client.send(request_bytes(CHAT, b"{") * 2000)
    for _ in range(2000):
        assert (await client.receive()).status == 400


async def test_a_pipelined_client_that_leaves_aborts_the_request_that_runs(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    client = await rig.client()
    await client.send(raw() + raw())
    seen = await rig.decode.next_request()
    client.leave()
    await asyncio.wait_for(seen.ended.wait(), PATIENCE_S)
    assert len(rig.decode.seen) == 1


async def test_a_request_that_arrives_byte_by_byte(rig: Rig) -> None:
    client = await rig.client()
    await client.get("/health")
    request = raw()
    for index in range(len(request)):
        rig.feed(client, request[index : index + 1])
    assert (await client.receive()).status == 200


async def test_a_chunked_request_body(rig: Rig) -> None:
    client = await rig.client()
    body = json.dumps(PROMPT).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    await client.send(head + chunks + b"0\r\n\r\n")
    assert (await client.receive()).status == 200
    assert rig.decode.seen[0].body["prompt"] == PROMPT["prompt"]


async def test_a_body_of_a_megabyte(rig: Rig) -> None:
    prompt = "x" * (1 << 20)
    answer = await (await rig.client()).post(COMPLETIONS, {"prompt": prompt})
    assert answer.status == 200
    assert rig.decode.seen[0].body["prompt"] == rig.prefill.seen[0].body["prompt"] == prompt


async def test_a_client_that_asks_before_it_sends_its_body(rig: Rig) -> None:
    client = await rig.client()
    head, _, body = raw(PROMPT, expect="100-continue").partition(b"\r\n\r\n")
    await client.send(head + b"\r\n\r\n")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(body)
    assert (await client.receive()).status == 200
    assert "expect" not in rig.decode.seen[0].message.headers


async def test_an_http_1_0_client_gets_a_stream_without_chunks(rig: Rig) -> None:
    client = await rig.client()
    await client.send(raw({**PROMPT, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, body = (await asyncio.wait_for(client.reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"".join(rig.decode.events(rig.decode.seen[0]))


async def test_connection_close_is_honoured(rig: Rig) -> None:
    client = await rig.client()
    answer = await client.post(COMPLETIONS, PROMPT, {"connection": "close"})
    assert answer.headers["connection"] == "close"
    assert await is_closed(client)


async def test_an_idle_client_connection_is_closed_after_its_time() -> None:
    async with running_rig(client_idle_s=1.0) as rig:
        client = await rig.client()
        assert (await client.post(COMPLETIONS, PROMPT)).status == 200
        assert await is_closed(client)


async def test_small_writes_are_sent_at_once_on_both_sides(rig: Rig) -> None:
    client = await rig.client()
    await client.post(COMPLETIONS, PROMPT)
    (connection,) = rig.router.services.engines[Role.DECODE][0].pool._all
    transports = [connection._transport, *(client.transport for client in rig.server.server_state.connections)]
    for transport in transports:
        assert transport is not None
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


# Beside the hot paths.


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_hot_paths_take_post_only(rig: Rig, method: str) -> None:
    answer = await (await rig.client()).get(CHAT, method=method)
    assert (answer.status, code_of(answer)) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_unknown_paths_and_methods_are_openai_errors(rig: Rig) -> None:
    client = await rig.client()
    answer = await client.get("/v1/nothing")
    assert (answer.status, code_of(answer)) == (404, "not_found")
    answer = await client.post("/health", {})
    assert (answer.status, code_of(answer)) == (405, "method_not_allowed")


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/fine_tuning/jobs", "/v1/audio/transcriptions"])
async def test_what_vllm_serves_beside_completions_is_refused_by_its_name(rig: Rig, path: str) -> None:
    answer = await (await rig.client()).post(path, PROMPT)
    assert (answer.status, code_of(answer)) == (404, "not_found")
    assert path in answer.body.decode()


async def test_a_query_does_not_hide_a_hot_path(rig: Rig) -> None:
    assert (await (await rig.client()).post(f"{COMPLETIONS}?x=1", PROMPT)).status == 200


async def test_head_of_health_has_no_body(rig: Rig) -> None:
    client = await rig.client()
    await client.send(request_bytes("/health", b"", method="HEAD") + request_bytes("/health", b"", method="GET"))
    both = await client.reader.readuntil(b'{"status":"ok"}')
    assert both.count(b"200 OK") == 2


async def test_models_come_from_a_decode_engine_that_answers() -> None:
    async with running_rig(num_decode=2) as rig:
        await rig.decodes[0].stop()
        client = await rig.client()
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
        await rig.decodes[1].stop()
        assert (await client.get("/v1/models")).status == 200  # For some seconds the list is remembered.
        await client.send(request_bytes("/v1/models", b"", {"authorization": "another"}, method="GET"))
        answer = await client.receive()
        assert (answer.status, code_of(answer)) == (503, "no_decode_engine")


async def test_health_names_who_is_missing_and_recovers() -> None:
    async with running_rig(probe_interval_s=0.02) as rig:
        client = await rig.client()
        assert (await client.get("/health")).status == 200
        await rig.prefill.stop()
        await health_is(rig, False)
        answer = await client.get("/health")
        assert answer.status == 503
        assert "no prefill engine" in answer.json()["error"]["message"]
        assert await rig.metric(f'pdcluster_router_engine_up{{engine="{rig.prefill.url}",role="prefill"}}') == 0
        await rig.prefill.start(int(rig.prefill.url.rpartition(":")[2]))
        await health_is(rig, True)
        assert (await client.get("/health")).status == 200


async def test_the_overview_lists_the_engines(rig: Rig) -> None:
    overview = (await (await rig.internal()).get("/")).json()
    assert [engine["role"] for engine in overview["engines"]] == ["prefill", "decode"]


async def test_the_docs_are_served_on_both_ports_and_load_nothing_from_elsewhere(rig: Rig) -> None:
    client, internal = await rig.client(), await rig.internal()
    assert "/v1/models" in (await client.get("/openapi.json")).json()["paths"]
    for port in (client, internal):
        page = await port.get("/docs")
        assert page.status == 200
        assert b"/health" in page.body
        assert not any(mark in page.body for mark in (b"//", b"<script", b"<link", b"<img"))
        assert (await port.get("/redoc")).status == 404


async def test_a_draining_router_takes_nothing_new_and_finishes_what_runs(rig: Rig) -> None:
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    running, late = await rig.client(), await rig.client()
    await running.send(raw({**PROMPT, "stream": True}))
    await running.reader.readuntil(b"Hello")
    rig.router.drain()
    answer = await late.post(COMPLETIONS, PROMPT)
    assert (answer.status, code_of(answer)) == (503, "draining")
    assert (await (await rig.client()).get("/health")).status == 503
    rig.decode.open_gate(Gate.SECOND_TOKEN)
    assert (await running.reader.readuntil(b"0\r\n\r\n")).count(b"data: ") == 4


async def test_what_still_runs_when_the_router_stops_gets_an_error(rig: Rig) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig)
    order = await rig.prefill.next_request()
    await rig.router.wait_until_idle(0)
    answer = await client.receive()
    assert (answer.status, code_of(answer)) == (503, "stopped")
    await order.ended.wait()
    assert order.is_disconnected


async def health_is(rig: Rig, is_healthy: bool) -> None:
    await until(lambda: rig.router.services.engines[Role.PREFILL][0].is_healthy is is_healthy)
