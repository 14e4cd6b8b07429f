"""What a request costs does not grow in step with the number of engines; `benchmarks.router_peers` has the figure."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.router_attacks import on_cpu_s

from fakes.engine import FakeEngine, Wire
from fakes.http import RawClient
from fakes.router import COMPLETIONS
from integration.router_scene import PATIENT, Scene, running_router, until
from patience import EDGE_S, PATIENCE_S
from pdcluster_protocol.secret import load_secret

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_128_times_as_many_engines_cost_less_than_three_times_as_much_cpu() -> None:
    """4.6 times when each choice looked at every engine."""
    few, many = await cpu_of_requests(2), await cpu_of_requests(256)
    assert many < 3 * few, (few, many)


async def ask_in_rows(scene: Scene, number: int, at_once: int) -> None:
    """So many requests from so many clients, each of which asks when it has its answer."""
    left = iter(range(number))

    async def ask_in_a_row(client: RawClient) -> None:
        for _ in left:
            assert (await client.post(COMPLETIONS, {"prompt": "y" * 200, "max_tokens": 256})).status == 200

    clients = [await scene.client() for _ in range(at_once)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(ask_in_a_row(client) for client in clients))


async def cpu_of_requests(num_engines: int) -> float:
    """Seconds of the router's loop for 300 requests. All engines of a role are one, under many addresses."""
    secret, wire = load_secret({}, host="127.0.0.1"), Wire()
    engines = [FakeEngine(wire, secret) for _ in range(2)]
    flags = [*PATIENT, f"--probe-interval={EDGE_S}"]
    for role, engine in zip(("prefill", "decode"), engines, strict=True):
        await engine.start(host="0.0.0.0")  # all of loopback's addresses
        port = engine.url.rpartition(":")[2]
        flags += [f"--{role}=http://127.0.{1 + index // 128}.{1 + index % 128}:{port}" for index in range(num_engines)]
    try:
        async with running_router(flags) as (pid, said, log):
            scene = Scene(pid, said, log, secret, prefills=engines[:1], decodes=engines[1:])
            await until(lambda: have_all_been_asked(scene, num_engines))
            await ask_in_rows(scene, 2 * num_engines, 8)  # Connections are there.
            before = on_cpu_s(pid)
            await ask_in_rows(scene, 300, 8)
            return on_cpu_s(pid) - before
    finally:
        for engine in engines:
            await engine.stop()


async def have_all_been_asked(scene: Scene, num_engines: int) -> bool:
    """Whether the router has found each engine healthy."""
    page = (await scene.get("/", is_internal=True)).json()
    return [engine["healthy"] for engine in page["engines"]] == [True] * (2 * num_engines)
