"""``pdcluster top``: the command itself, against a router that is a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process

import pytest

from fakes.http import RawClient
from fakes.router import COMPLETIONS, PROMPT
from integration.ports import fresh_port
from integration.test_router_process import process
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio


async def top(*words: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdcluster_cli", "top", *words, stdout=PIPE, stderr=PIPE
    )


async def test_one_look_shows_each_engine_and_names_a_router_that_is_not_there() -> None:
    port, closed = fresh_port(), f"http://127.0.0.1:{fresh_port()}"
    url = f"http://127.0.0.1:{port}"
    async with process("--internal-port", str(port)) as (_, clients, prefill, decode):
        client = await RawClient.connect(clients)
        await client.post(COMPLETIONS, PROMPT, {"x-request-id": "R-7"})
        look = await top("--once", "--url", closed, "--url", url)
        out, err = await asyncio.wait_for(look.communicate(), PATIENCE_S)
    text = out.decode()
    assert (look.returncode, err) == (0, b"")
    assert text.startswith(f"{closed}: no answer: ")
    assert f"{url}: 0 requests run, 0 wait for prefill" in text
    assert "ended since the start: ok 1\n" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[-1] for row in rows if row and row[0] in ("decode-0", "prefill-0")] == [decode.url, prefill.url]
    assert rows[-1][3:6] == ["R-7", "200", "ok"]


async def test_without_a_router_one_look_is_status_2() -> None:
    look = await top("--once", "--url", f"http://127.0.0.1:{fresh_port()}")
    await asyncio.wait_for(look.communicate(), PATIENCE_S)
    assert look.returncode == 2


async def test_it_looks_again_until_ctrl_c_which_is_a_good_end() -> None:
    port = fresh_port()
    async with process("--internal-port", str(port)):
        looks = await top("--interval-s", "0.1", "--url", f"http://127.0.0.1:{port}")
        assert looks.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2):
                while b"requests run" not in await looks.stdout.readline():
                    pass
            looks.send_signal(signal.SIGINT)
            _, err = await looks.communicate()
    assert (looks.returncode, err) == (0, b"")
