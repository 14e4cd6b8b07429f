"""``pdcluster why``: the command itself, against routers that are processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from fakes.faults import Fault
from fakes.http import RawClient
from fakes.router import COMPLETIONS, PROMPT
from integration.ports import fresh_port
from integration.test_router_process import process
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio


async def why(*words: str, stdin: str = "") -> tuple[int, str, str]:
    """Status, stdout and stderr."""
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdcluster_cli", "why", *words, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(command.communicate(stdin.encode(errors="surrogateescape")), PATIENCE_S)
    assert command.returncode is not None
    return command.returncode, out.decode(), err.decode()


async def why_of(stdin: bytes, *words: str) -> tuple[int, str, str]:
    """The same of an access log on standard input."""
    return await why(*words, "--access-log", "-", stdin=stdin.decode(errors="surrogateescape"))


async def ask(url: str, request_id: str) -> int:
    return (await (await RawClient.connect(url)).post(COMPLETIONS, PROMPT, {"x-request-id": request_id})).status


async def test_of_several_routers_the_one_that_had_the_request_tells_of_it() -> None:
    ports = [str(fresh_port()) for _ in range(2)]
    flags = [("--internal-port", port, "--on-prefill-failure", "fail") for port in ports]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    both = ("--url", urls[0], "--url", urls[1])
    async with process(*flags[0]) as (_, url, prefill, _), process(*flags[1]):
        assert await ask(url, "good") == 200
        prefill.fault = Fault.ERROR_500
        assert await ask(url, "bad") == 502
        good, bad, none = [await why(name, *both) for name in ("good", "bad", "nothing")]
    assert good[0] == 0
    assert good[1].startswith("good went well after ")
    assert "first byte from decode-0" in good[1]
    assert (bad[0], bad[2]) == (1, "")
    assert "bad failed: 502 prefill_failed after" in bad[1]
    assert f"(told by {urls[0]})" in bad[1]
    assert "cause: the prefill engine refused, answered an error, or was cut off (prefill-0)" in bad[1]
    assert f"prefill-0 is {prefill.url}" in bad[1]
    assert (none[0], none[1]) == (2, "")
    assert f"{urls[0]} knows no request 'nothing'; it has served ones of the last" in none[2]
    assert f"{urls[1]} knows no request 'nothing'; it has none at all" in none[2]
    assert "--access-log" in none[2]


async def test_a_router_that_does_not_answer_is_named_and_the_other_one_counts() -> None:
    port, closed = fresh_port(), f"http://127.0.0.1:{fresh_port()}"
    async with process("--internal-port", str(port)) as (_, url, _, _):
        assert await ask(url, "R") == 200
        told = await why("R", "--url", closed, "--url", f"127.0.0.1:{port}")
        clients_port = await why("R", "--url", url)
    assert told[0] == 0
    assert f"{closed}: no answer" in told[2]
    assert (clients_port[0], clients_port[1]) == (2, "")
    assert "is this the internal port" in clients_port[2]


async def test_older_requests_are_in_the_access_log(tmp_path: Path) -> None:
    log = tmp_path / "access"
    async with process("--access-log", str(log)) as (router, url, _, decode):
        decode.fault = Fault.DIE
        assert await ask(url, "R") == 502
        router.terminate()
        await router.wait()
    status, out, _ = await why("R", "--access-log", str(log))
    assert (status, "cause: the decode engine broke off" in out) == (1, True)
    assert await why("R", "--access-log", "-", stdin=f"some line\n{log.read_text()}") == (
        status,
        out.replace(str(log), "-"),
        "",
    )
    none = await why("S", "--access-log", str(log))
    assert (none[0], f"{log} has no line of a request 'S'" in none[2], "--access-log" in none[2]) == (2, True, False)
    assert json.loads(log.read_text())["request_id"] == "R"


async def test_ids_from_hostile_hands_and_other_bytes_in_a_log_are_taken(tmp_path: Path) -> None:
    log = tmp_path / "access"
    bug = b'{"event":"access","ts":"2026-11-26T08:00:00Z","request_id":"bug","outcome":null,"model":"\\u001b[2J"}\n'
    log.write_bytes(b"\xff\xfe\x00\n" + bug)
    assert (await why("\udcff\x1b[2J", "--access-log", str(log)))[0] == 2
    assert (await why("\udcff", "--url", f"http://127.0.0.1:{fresh_port()}"))[0] == 2
    for status, out, err in (await why("bug", "--access-log", str(log)), await why_of(log.read_bytes(), "bug")):
        assert (status, err) == (1, "")
        assert "cause: the router failed on it" in out
        assert "\x1b" not in out


async def test_a_reader_that_has_enough_is_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "access"
    log.write_text('{"event":"access","ts":"2026-11-26T08:00:00Z","request_id":"R","outcome":"ok"}\n')
    reading, writing = os.pipe()
    os.close(reading)
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdcluster_cli", "why", "R", "--access-log", str(log), stdout=writing, stderr=PIPE
    )
    os.close(writing)
    _, err = await asyncio.wait_for(command.communicate(), PATIENCE_S)
    assert (command.returncode, err) == (141, b"")
