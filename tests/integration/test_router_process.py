"""The router as a process: started as a user does, stopped as Kubernetes does."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fakes.engine import FakeEngine, Wire
from fakes.faults import Gate
from fakes.http import RawClient, request_bytes
from fakes.router import COMPLETIONS
from patience import PATIENCE_S
from pdcluster_protocol.secret import load_secret

pytestmark = pytest.mark.anyio

STREAM = json.dumps({"prompt": "a", "stream": True}).encode()


async def start_router(*flags: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdcluster_router", *flags, stdout=PIPE, stderr=PIPE
    )


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[Process, str, FakeEngine, FakeEngine]]:
    secret = load_secret({}, host="127.0.0.1")  # Neither the router nor its engines are given one.
    prefill, decode = (FakeEngine(wire, secret) for wire in [Wire()] * 2)
    for engine in (prefill, decode):
        await engine.start()
    router = await start_router("--prefill", prefill.url, "--decode", decode.url, "--port", "0", *flags)
    try:
        assert router.stdout is not None
        line = await asyncio.wait_for(router.stdout.readline(), PATIENCE_S)
        yield router, line.decode().split()[-1], prefill, decode
    finally:
        if router.returncode is None:
            router.kill()
        await router.wait()
        for engine in (prefill, decode):
            await engine.stop()


async def test_sigterm_lets_a_running_stream_end_and_then_stops_with_status_0(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    async with process("--trace-file", str(trace)) as (router, url, _, decode):
        decode.close_gate(Gate.SECOND_TOKEN)
        client = await RawClient.connect(url)
        await client.send(request_bytes(COMPLETIONS, STREAM))
        await client.reader.readuntil(b"Hello")
        router.send_signal(signal.SIGTERM)
        late = await RawClient.connect(url)
        while (await late.get("/health")).status != 503:
            pass
        decode.open_gate(Gate.SECOND_TOKEN)
        assert (await client.reader.readuntil(b"0\r\n\r\n")).count(b"data: ") == 4
        assert await asyncio.wait_for(router.wait(), PATIENCE_S) == 0
        assert json.loads(trace.read_text())["status"] == 200


async def test_ctrl_c_twice_does_not_wait_for_what_runs() -> None:
    async with process() as (router, url, prefill, _):
        prefill.close_gate(Gate.PREFILL)
        client = await RawClient.connect(url)
        await client.send(request_bytes(COMPLETIONS, STREAM))
        order = await prefill.next_request()
        router.send_signal(signal.SIGINT)
        late = await RawClient.connect(url)
        while (await late.get("/health")).status != 503:
            pass
        router.send_signal(signal.SIGINT)
        answer = await client.receive()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "stopped")
        await order.ended.wait()
        assert await asyncio.wait_for(router.wait(), PATIENCE_S) == 0
        assert router.stderr is not None
        assert b"Traceback" not in await router.stderr.read()


@pytest.mark.parametrize("what", ["port", "internal", "keys", "trace", "access", "url", "secret"])
async def test_what_cannot_work_is_one_line_with_the_cure_and_status_2(what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = {
            "port": ["--port", str(taken.getsockname()[1])],
            "internal": ["--port", "0", "--internal-port", str(taken.getsockname()[1])],
            "keys": ["--port", "0", "--api-key-file", "/nowhere/keys"],
            "trace": ["--port", "0", "--trace-file", "/nowhere/trace"],
            "access": ["--port", "0", "--access-log", "/nowhere/access"],
            "url": ["--port", "0", "--host", "0.0.0.0"],
            "secret": ["--port", "0", "--host", "0.0.0.0", "--advertise-url", "http://10.0.0.1:8000"],
        }[what]
        router = await start_router("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", *flags)
        _, error = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert router.returncode == 2
    (line,) = error.decode().splitlines()
    cures = {
        "trace": "name a file",
        "access": "name a file",
        "url": "--advertise-url",
        "secret": "PDCLUSTER_SECRET",
        "keys": "name a file",
    }
    assert {"port": "another --port", "internal": "another --internal-port", **cures}[what] in line


async def test_in_json_every_line_of_the_log_is_an_object() -> None:
    async with process("--log-format", "json") as (router, url, _, _):
        await (await RawClient.connect(url)).get("/health")
        router.send_signal(signal.SIGTERM)
        assert router.stderr is not None
        lines = [json.loads(line) for line in (await router.stderr.read()).splitlines()]
    [started] = [line for line in lines if line["event"] == "router started"]
    assert (started["prefill_engines"], started["decode_engines"], started["level"]) == (1, 1, "info")
    assert {line["logger"].partition(".")[0] for line in lines} >= {"pdcluster_router"}


async def test_the_access_log_goes_to_stdout_where_that_is_asked_for() -> None:
    async with process("--access-log", "-") as (router, url, _, _):
        client = await RawClient.connect(url)
        await client.get("/health")
        await client.post(COMPLETIONS, STREAM, {"x-request-id": "R-1"})
        router.send_signal(signal.SIGTERM)
        assert router.stdout is not None
        lines = (await asyncio.wait_for(router.stdout.read(), PATIENCE_S)).decode().splitlines()
        assert await asyncio.wait_for(router.wait(), PATIENCE_S) == 0
    [line] = [json.loads(line) for line in lines if line.startswith("{")]
    assert (line["event"], line["request_id"], line["status"]) == ("access", "R-1", 200)
