"""Large bodies: many that are whole at once stop nobody, and none outlives its client."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from fakes.engine import FakeEngine
from fakes.faults import Gate
from fakes.http import RawClient, request_bytes
from fakes.router import COMPLETIONS, Rig, running_rig, until

pytestmark = pytest.mark.anyio

MB = 1 << 20
BODY = json.dumps({"prompt": "x" * (2 * MB), "stream": True}).encode()
RAW = request_bytes(COMPLETIONS, BODY)
OURS = tracemalloc.Filter(True, "*/pdcluster_router/*")


async def almost_whole(rig: Rig, num: int) -> list[RawClient]:
    """Clients whose bodies lack their last byte."""
    clients = [await rig.client() for _ in range(num)]
    for client in clients:
        await client.send(RAW[:-1])
    await until(lambda: all(rig.connection_of(client).num_body_bytes_left() == 1 for client in clients))
    return clients


async def test_of_large_bodies_that_are_whole_in_one_turn_each_turn_takes_one() -> None:
    async with running_rig() as rig:
        rig.decode.close_gate(Gate.RESERVE)
        clients = await almost_whole(rig, 4)
        for client in clients:
            rig.feed(client, RAW[-1:])
        running = rig.router.services.running
        numbers = [len(running)]
        while numbers[-1] < 4:
            await asyncio.sleep(0)
            numbers.append(len(running))
        assert numbers == [1, 2, 3, 4]
        rig.decode.open_gate(Gate.RESERVE)
        assert [(await client.receive()).status for client in clients] == [200] * 4


# Each leaves the one client at another step of its request, and returns it.


async def in_its_body(rig: Rig) -> RawClient:
    (client,) = await almost_whole(rig, 1)
    return client


async def behind_bodies_that_came_first(rig: Rig) -> RawClient:
    clients = await almost_whole(rig, 4)
    for client in clients:
        rig.feed(client, RAW[-1:])
    for client in clients:
        rig.connection_of(client).abort()  # Now: the first has been handed over, and connects.
    return clients[-1]


async def in_the_queue(rig: Rig) -> RawClient:
    rig.decode.close_gate(Gate.RESERVE)
    clients = [await rig.client() for _ in range(6)]
    for client in clients:
        await client.send(RAW)
    await until(lambda: rig.router.services.num_queued > 0)
    for client in clients[1:]:
        client.leave()
    return clients[0]


async def held_by(rig: Rig, engine: FakeEngine, gate: Gate) -> RawClient:
    engine.close_gate(gate)
    client = await rig.client()
    await client.send(RAW)
    await engine.next_request()
    return client


async def at_decode(rig: Rig) -> RawClient:
    return await held_by(rig, rig.decode, Gate.RESERVE)


async def at_prefill(rig: Rig) -> RawClient:
    return await held_by(rig, rig.prefill, Gate.PREFILL)


async def in_its_answer(rig: Rig) -> RawClient:
    client = await held_by(rig, rig.decode, Gate.SECOND_TOKEN)
    await client.reader.readuntil(b"Hello")
    return client


STEPS = (in_its_body, behind_bodies_that_came_first, in_the_queue, at_decode, at_prefill, in_its_answer)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
async def test_a_client_that_has_gone_leaves_nothing(step: Callable[[Rig], Awaitable[RawClient]]) -> None:
    async with running_rig(max_prefill_backlog_tokens=1000) as rig:
        with our_memory() as num_bytes:
            client = await step(rig)
            client.leave()
            await until(lambda: rig.router.room.used_bytes == 0 and not rig.router.services.running)
            await rig.settled()
            assert num_bytes() < len(BODY) // 4


async def test_the_memory_of_a_body_is_seen_while_its_client_is_there(rig: Rig) -> None:
    with our_memory() as num_bytes:
        client = await at_decode(rig)
        assert num_bytes() > len(BODY)
        client.leave()
        await rig.settled()


async def test_a_large_body_is_freed_once_decode_answers_and_prefill_is_over(rig: Rig) -> None:
    with our_memory() as num_bytes:
        client = await in_its_answer(rig)
        await until(lambda: num_bytes() < len(BODY) // 4)
        assert rig.router.services.running
        client.leave()
        await rig.settled()


@contextmanager
def our_memory() -> Iterator[Callable[[], int]]:
    """Bytes that the router's own code has made since, and keeps; without the collector, which would hide circles."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield lambda: sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([OURS]).traces)
    finally:
        tracemalloc.stop()
        gc.enable()
