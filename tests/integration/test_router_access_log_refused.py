"""The access log's lines of requests that were refused, of pages, and what is in no line."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.access_log import KEY, TALK, Log, ask, logged_rig, some
from fakes.faults import Fault, Gate
from fakes.http import RawClient, request_bytes
from fakes.messages import MESSAGES
from fakes.router import CHAT, COMPLETIONS, PROMPT, Rig, raw, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.access import AccessLine

pytestmark = pytest.mark.anyio


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "access")


# Refused.


async def occupied(rig: Rig) -> RawClient:
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig)
    await rig.prefill.next_request()
    return client


async def test_the_queue_is_told_of_who_waits_who_is_turned_away_and_who_leaves(log: Log) -> None:
    async with logged_rig(log, max_prefill_backlog_tokens=1, max_queued_requests=2) as rig:
        first = await occupied(rig)
        waits = await send(rig, **{"x-request-id": "waits"})
        leaves = await send(rig, **{"x-request-id": "leaves"})
        await until(lambda: rig.router.services.num_queued == 2)
        assert (await ask(rig, x_request_id="full")).status == 429
        leaves.leave()
        await until(lambda: rig.router.services.num_queued == 1)
        rig.prefill.open_gate(Gate.PREFILL)
        for client in (first, waits):
            assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200
    lines = {line["request_id"]: line for line in log.lines}
    assert len(lines) == 4
    assert some(lines["full"], "status", "outcome", "failures") == (429, "overloaded", ["queue_full"])
    assert some(lines["leaves"], "status", "outcome", "failures") == (None, "client_gone", ["client_gone"])
    assert 0 < lines["waits"]["queue_s"] <= lines["waits"]["reservation_s"]


async def test_a_wait_in_the_queue_that_was_too_long_is_told(log: Log) -> None:
    async with logged_rig(log, max_prefill_backlog_tokens=1, queue_timeout_s=0.2) as rig:
        first = await occupied(rig)
        assert (await ask(rig)).status == 503
        rig.prefill.open_gate(Gate.PREFILL)
        await asyncio.wait_for(first.receive(), PATIENCE_S)
    late = log.lines[0]
    assert some(late, "status", "outcome", "failures") == (503, "overloaded", ["queue_timeout"])
    assert 0.19 <= late["queue_s"] <= late["total_s"]


@pytest.mark.parametrize(
    ("sent", "status", "path"),
    [
        (raw([]), 400, COMPLETIONS),
        (request_bytes(CHAT, b"[1"), 400, CHAT),
        (request_bytes(MESSAGES, b"no json"), 400, MESSAGES),
        (raw(PROMPT, **{"x-request-timeout": "soon"}), 400, COMPLETIONS),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n", 413, COMPLETIONS),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", 400, ""),
        (b"GET /v1/models HTTP/1.1\r\n\r\n", 400, "/v1/models"),
        (b"GET http://u:p@host/v1/x?key=1 HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "/v1/x"),
        (b"GET ftp://u:p@host/v1/x HTTP/1.1\r\n\r\n", 400, ""),
        (b"CONNECT u:p@host:443 HTTP/1.1\r\nhost: a\r\n\r\n", 405, ""),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "*"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 5000 + b"\r\n\r\n", 431, COMPLETIONS),
    ],
)
async def test_what_the_router_refuses_has_a_line(log: Log, sent: bytes, status: int, path: str) -> None:
    async with logged_rig(log, max_body_bytes=2000, max_header_bytes=2000) as rig:
        client = await rig.client()
        await client.send(sent)
        assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == status
        client.leave()
    assert some(log.line, "status", "outcome", "path") == (status, "rejected", path)
    assert log.line["bytes_out"] > 0


async def test_a_client_without_a_key_has_a_line_without_a_name(log: Log, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()} team-a\n")
    async with logged_rig(log, api_key_file=keys) as rig:
        assert (await ask(rig)).status == 401
        assert (await ask(rig, authorization="Bearer wrong")).status == 401
        assert (await ask(rig, authorization=f"Bearer {KEY}")).status == 200
        assert (await ask(rig, b"{", authorization=f"Bearer {KEY}")).status == 400
        assert (await ask(rig, {"prompt": "a"}, "/tokenize")).status == 401
        assert (await ask(rig, {"prompt": "a"}, "/tokenize", authorization=f"Bearer {KEY}")).status == 200
    told = [some(line, "status", "outcome", "client") for line in log.lines]
    assert told[:4] == [
        (401, "rejected", ""),
        (401, "rejected", ""),
        (200, "ok", "team-a"),
        (400, "rejected", "team-a"),
    ]
    assert told[4:] == [(401, "rejected", ""), (200, "ok", "team-a")]


async def test_a_router_that_ends_tells_of_what_it_turns_away_and_cuts_off(log: Log) -> None:
    async with logged_rig(log) as rig:
        await occupied(rig)
        rig.router.drain()
        assert (await ask(rig, x_request_id="late")).status == 503
        assert (await ask(rig, {"prompt": "a"}, "/tokenize", x_request_id="question")).status == 503
        await rig.router.wait_until_idle(0)
        await rig.settled()
    told = {line["request_id"]: some(line, "status", "outcome", "failures") for line in log.lines}
    assert (told.pop("late"), told.pop("question")) == ((503, "rejected", []), (503, "rejected", []))
    assert list(told.values()) == [(503, "lost", ["stopped"])]


async def test_pipelined_requests_have_a_line_each_in_their_order(log: Log) -> None:
    async with logged_rig(log) as rig:
        client = await rig.client()
        ids = [f"r{number}" for number in range(5)]
        await client.send(b"".join(raw(PROMPT, **{"x-request-id": name}) for name in ids))
        for name in ids:
            assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).headers["x-request-id"] == name
    assert [line["request_id"] for line in log.lines] == ids


# Pages.


async def test_pages_have_lines_but_probes_of_health(log: Log) -> None:
    async with logged_rig(log) as rig:
        await ask(rig, {"prompt": "a"}, "/tokenize?x=1")
        await ask(rig, {}, "/detokenize")
        for path in ("/v1/models", "/health", "/v1/nothing", COMPLETIONS):
            await (await rig.client()).get(path)
        await (await rig.internal()).get("/metrics")
    told = [some(line, "method", "path", "status", "outcome", "decode_engine") for line in log.lines]
    assert told == [
        ("POST", "/tokenize", 200, "ok", "decode-0"),
        ("POST", "/detokenize", 400, "engine_error", "decode-0"),
        ("GET", "/v1/models", 200, "ok", ""),
        ("GET", "/v1/nothing", 404, "rejected", ""),
        ("GET", COMPLETIONS, 405, "rejected", ""),
    ]
    assert all(line["bytes_out"] for line in log.lines)
    assert some(log.lines[0], "bytes_in", "decode_attempts") == (len(json.dumps({"prompt": "a"})), 1)


async def test_an_engines_refusal_of_its_models_is_an_engines_error(log: Log) -> None:
    async with logged_rig(log) as rig:
        rig.decode.models_status = 500
        assert (await (await rig.client()).get("/v1/models")).status == 500
    assert some(log.line, "status", "outcome") == (500, "engine_error")


async def test_a_page_whose_body_cannot_be_read_has_one_line_with_what_its_client_was_sent(log: Log) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\nx-request-id: Q-1\r\ntransfer-encoding: chunked\r\n\r\n"
    async with logged_rig(log) as rig:
        whole, in_parts = await rig.client(), await rig.client()
        await whole.send(head + b"no number\r\n")
        await in_parts.send(head + b"1\r\n{\r\n")
        await until(lambda: rig.connection_of(in_parts).cycle is not None)
        await in_parts.send(b"no number\r\n")
        for client in (whole, in_parts):
            assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 400
    told = [some(line, "request_id", "method", "path", "status", "outcome") for line in log.lines]
    assert told == [("Q-1", "POST", "/tokenize", 400, "rejected")] * 2


async def test_a_question_that_no_engine_answers_is_unavailable(log: Log) -> None:
    async with logged_rig(log) as rig:
        await rig.decode.stop()
        assert (await ask(rig, {"prompt": "a"}, "/tokenize")).status == 503
    assert some(log.line, "status", "outcome", "decode_engine") == (503, "unavailable", "decode-0")


@pytest.mark.parametrize("is_logged", [False, True])
async def test_a_page_comes_back_with_an_id_too(log: Log, is_logged: bool) -> None:
    async with running_rig(access_log=log.path if is_logged else None) as rig:
        named = await ask(rig, {"prompt": "a"}, "/tokenize", x_request_id="Q-1")
        unnamed = await ask(rig, {"prompt": "a"}, "/tokenize", x_request_id="two words")
    assert named.headers["x-request-id"] == "Q-1"
    assert len(unnamed.headers["x-request-id"]) == 32
    if is_logged:
        ids = [line["request_id"] for line in log.lines]
        assert ids == ["Q-1", unnamed.headers["x-request-id"]]


# What is never in it.


async def test_no_prompt_key_or_query_is_in_any_line(log: Log) -> None:
    planted = "PLANTED"
    talk = {**TALK, "messages": [{"role": "user", "content": planted}], "user": planted, "session_id": planted}
    headers = {"authorization": f"Bearer {planted}", "x_api_key": planted, "cookie": planted, "x_other": planted}
    async with logged_rig(log, num_prefill=2) as rig:
        rig.decode.tokens = [planted] * 4
        rig.prefills[0].faults_to_come = rig.prefills[1].faults_to_come = [Fault.ERROR_500]
        for path in (CHAT, MESSAGES):
            for stream in (False, True):
                await ask(rig, {**talk, "stream": stream}, f"{path}?key={planted}", **headers)
        for body in ({"prompt": planted, "kv_transfer_params": {"x": planted}}, {"prompt": [planted]}, planted):
            await ask(rig, body, **headers)
        await ask(rig, {"prompt": planted}, f"/tokenize?key={planted}", **headers)
        await ask(rig, f'{{"prompt": "{planted}'.encode(), **headers)
        rig.decode.fault = Fault.DIE_MID_STREAM
        await ask(rig, {"prompt": planted, "stream": True}, **headers)
        for sent in (f"GET http://u:{planted}@h/v1/x?{planted} HTTP/1.1\r\n\r\n", f"{planted} {planted}\r\n\r\n"):
            client = await rig.client()
            await client.send(sent.encode())
            await asyncio.wait_for(client.receive(), PATIENCE_S)
    assert len(log.lines) == 12
    assert planted not in log.path.read_text()
    assert all("127.0.0.1" not in json.dumps({**line, "client_address": ""}) for line in log.lines)


async def test_a_clients_words_are_cut_and_make_no_second_line(log: Log) -> None:
    async with logged_rig(log) as rig:
        await ask(rig, {**PROMPT, "model": "x\n" * 5000})
        await ask(rig, b'{"prompt": "a", "model": "\\ud800"}')
        await ask(rig, {**PROMPT, "model": ["no", "name"]})
        await (await rig.client()).get("/" + "p" * 5000)
    lines = log.lines
    assert [len(line["model"]) for line in lines] == [128, 0, 0, 0]
    assert len(lines[3]["path"]) == 128


# Off, and when it cannot be written.


@pytest.mark.parametrize(("setting", "name"), [("access_log", "access_log"), ("trace_file", "trace")])
async def test_a_disk_that_is_full_costs_lines_and_no_request(setting: str, name: str) -> None:
    full: dict[str, Any] = {setting: Path("/dev/full")}
    async with running_rig(**full) as rig:
        assert [(await ask(rig)).status for _ in range(3)] == [200] * 3
        async with asyncio.timeout(PATIENCE_S):
            while await rig.metric(f"pdcluster_router_{name}_lost_lines_total") < 3:
                await asyncio.sleep(0.01)


async def test_lines_are_there_while_the_router_runs(log: Log) -> None:
    async with logged_rig(log) as rig:
        await ask(rig)
        await until(lambda: bool(log.path.read_text()))
        assert msgspec.json.decode(log.path.read_text(), type=AccessLine).outcome == "ok"
