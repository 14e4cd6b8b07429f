"""A router process as picker of a real Envoy: what its end means for clients, and 10,000 answers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from fakes.http import RawClient
from fakes.router import COMPLETIONS, PROMPT, STREAM
from gateway.envoy import Envoy, running_envoy
from integration.ports import fresh_port
from integration.processes import is_port_free
from integration.router_scene import Scene, running_scene, until
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

NUM_MANY: Final = 10_000
AT_ONCE_S: Final = PATIENCE_S / 4
"""Far below any limit of the gateway's in these tests, far above what a crowded machine takes for one error."""
STILL_S: Final = 2.0
"""More than the second at which Envoy probes the picker, less than a probe waits."""
ENDS: Final = (400, 500, 502, 503, 504)


@asynccontextmanager
async def scene(*, fails_open: bool = False, num_decode: int = 2) -> AsyncIterator[tuple[Scene, Envoy]]:
    port = fresh_port()
    # No probes: a fake engine may swallow the first byte of one that comes right after an answer on its connection.
    async with running_scene(f"--picker-port={port}", "--probe-interval=60", num_decode=num_decode) as router:
        urls = [engine.url for engine in router.decodes]
        async with running_envoy(port, urls, fails_open=fails_open) as envoy:
            yield router, envoy


async def test_with_fail_open_decode_engines_answer_alone_once_the_picker_is_killed() -> None:
    async with scene(fails_open=True) as (router, envoy):
        assert (await envoy.ask(PROMPT)).status == 200
        os.kill(router.pid, signal.SIGKILL)
        await until(lambda: _is_served(envoy))  # The gateway's next probe tells it.
        for engine in router.decodes:
            engine.seen.clear()
        for body in (PROMPT, STREAM) * 2:
            answer = await envoy.ask(body)
            assert (answer.status, answer.is_whole) == (200, True)
        assert [[seen.params for seen in engine.seen] for engine in router.decodes] == [[None, None]] * 2
        assert len(router.prefill.seen) == 1


async def _is_served(envoy: Envoy) -> bool:
    return (await envoy.ask(PROMPT)).status == 200


async def test_with_fail_closed_there_is_one_error_at_once() -> None:
    async with scene() as (router, envoy):
        assert (await envoy.ask(PROMPT)).status == 200
        os.kill(router.pid, signal.SIGKILL)
        for body in (PROMPT, STREAM):
            began_at = time.monotonic()
            answer = await envoy.ask(body)
            assert answer.status in (500, 503, 504)
            assert time.monotonic() - began_at < AT_ONCE_S
        assert sum(len(engine.seen) for engine in router.decodes) == 1


@pytest.mark.parametrize("fails_open", [False, True], ids=["closed", "open"])
async def test_a_request_that_waits_for_a_killed_picker_ends(fails_open: bool) -> None:
    """With fail-open Envoy has given the body away, so it cannot go on without its picker. It may
    give an engine a part of the picker's body, or none, which is no JSON."""
    port = fresh_port()
    async with running_scene(f"--picker-port={port}", "--max-prefill-backlog-tokens=1") as router:
        router.prefill.fault = router.prefill.fault.HANG
        async with running_envoy(port, [router.decode.url], fails_open=fails_open) as envoy:
            first, second = (asyncio.create_task(envoy.ask(PROMPT)) for _ in range(2))
            await until(lambda: _queued(router, 1))
            os.kill(router.pid, signal.SIGKILL)
            answers = await asyncio.gather(first, second, return_exceptions=True)
            assert not any(isinstance(one, TimeoutError) for one in answers), answers
            assert all(isinstance(one, BaseException) or one.status in ENDS for one in answers), answers


@pytest.mark.parametrize("fails_open", [False, True], ids=["closed", "open"])
async def test_a_picker_that_stands_still_for_two_seconds_is_still_asked(fails_open: bool) -> None:
    """As on a machine that gives it no time: requests wait for it, and none is an error or goes past it."""
    async with scene(fails_open=fails_open) as (router, envoy):
        os.kill(router.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STILL_S)
            asked = asyncio.create_task(envoy.ask(PROMPT))
            await asyncio.sleep(0.5)
            assert not asked.done()
        finally:
            os.kill(router.pid, signal.SIGCONT)
        assert (await asked).status == 200
        assert len(router.prefill.seen) == 1


async def _queued(router: Scene, num: int) -> bool:
    return await router.metric("pdcluster_router_queue_length") == num


async def test_a_drained_router_lets_running_requests_of_gateways_end() -> None:
    async with scene() as (router, envoy):
        for engine in router.decodes:
            engine.token_s = 0.2
        client = await envoy.client()
        answering = asyncio.create_task(client.post(COMPLETIONS, STREAM))
        await until(lambda: _has_seen(router))
        os.kill(router.pid, signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            answer = await answering
        assert (answer.status, answer.is_whole, answer.body.count(b"data: ")) == (200, True, 5)


async def _has_seen(router: Scene) -> bool:
    return any(engine.seen for engine in router.decodes)


async def test_two_pickers_never_share_a_port() -> None:
    port = fresh_port()
    async with running_scene(f"--picker-port={port}") as router:
        flags = [f"--prefill={router.prefill.url}", f"--decode={router.decode.url}", "--port=0"]
        said = await _said_at_its_end(*flags, f"--picker-port={port}")
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "choose another --picker-port" in said


async def test_a_decode_engine_that_has_a_name_and_no_address_is_refused_at_the_start() -> None:
    said = await _said_at_its_end("--prefill=http://127.0.0.1:1", "--decode=http://localhost:1", "--picker-port=9")
    assert "gateways take addresses only (--picker-port)" in said


async def test_without_the_extras_packages_one_line_names_the_extra() -> None:
    main = "from pdcluster_router.__main__ import main; sys.exit(main(sys.argv[1:]))"
    hidden = f"import sys; sys.modules['grpc'] = None; {main}"
    flags = ["--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:1", "--picker-port=9"]
    router = await asyncio.create_subprocess_exec(sys.executable, "-c", hidden, *flags, stdout=PIPE, stderr=PIPE)
    _, said = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert (router.returncode, len(said.splitlines())) == (2, 1)
    assert b"pip install 'pdcluster[router,picker]'" in said


async def test_a_router_imports_no_package_of_a_picker_of_tokens_or_of_the_api_servers_client_unasked() -> None:
    names = ("pdcluster_router.front.server", "grpc", "google.protobuf", "cryptography", "jwt", "aiohttp")
    code = f"import sys, pdcluster_router.__main__; print(*(name for name in {names} if name in sys.modules))"
    python = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
    said, _ = await asyncio.wait_for(python.communicate(), PATIENCE_S)
    assert said.split() == [b"pdcluster_router.front.server"]


async def _said_at_its_end(*flags: str) -> str:
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdcluster_router", *flags, stdout=PIPE, stderr=PIPE
    )
    _, said = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert router.returncode == 2
    (line,) = said.decode().splitlines()
    return line


@pytest.mark.slow
async def test_ten_thousand_answers_are_the_routers_own() -> None:
    async with scene() as (router, envoy):
        for engine in router.decodes:
            engine.is_parrot = True
        bodies = [
            {"prompt": f"once {number}", "seed": number, "stream": bool(number % 2)} for number in range(NUM_MANY)
        ]
        own = await _answers(router.url, bodies)
        through = await _answers(envoy.url, bodies)
        assert [number for number, pair in enumerate(zip(own, through, strict=True)) if pair[0] != pair[1]] == []
        assert len(set(own)) == NUM_MANY
        assert await router.metric("pdcluster_router_in_flight") == 0


async def _answers(url: str, bodies: list[dict[str, object]], num_clients: int = 16) -> list[bytes]:
    """Status and body of each, asked side by side."""
    answers = [b""] * len(bodies)

    async def ask(first: int) -> None:
        client = await RawClient.connect(url)
        for number in range(first, len(bodies), num_clients):
            async with asyncio.timeout(PATIENCE_S):
                answer = await client.post(COMPLETIONS, bodies[number], {"x-request-id": f"r-{number}"})
            assert answer.is_whole
            answers[number] = b"%d %b" % (answer.status, answer.body)
        client.leave()

    await asyncio.gather(*(ask(first) for first in range(num_clients)))
    return answers


async def test_nothing_is_left_of_a_gateways_process() -> None:
    async with scene() as (_, envoy):
        port = int(envoy.url.rsplit(":", 1)[1])
        assert not is_port_free(port)
    assert is_port_free(port)
    assert envoy.process.returncode is not None
