"""The most connections to one engine: what counts, and what a probe takes of them, which is nothing."""

from __future__ import annotations

import asyncio

import pytest

from fakes.faults import Gate
from fakes.router import COMPLETIONS, PROMPT, running_rig, send, until
from integration.test_router_pool import Hearer, silent_engine
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.http.connections import ConnectionPool, IdleConnections, PoolLimits

pytestmark = pytest.mark.anyio

GET = (b"GET / HTTP/1.1\r\n\r\n",)


def pool_of(url: str, max_connections: int) -> ConnectionPool:
    limits = PoolLimits(max_connections, PATIENCE_S, PATIENCE_S)
    return ConnectionPool("127.0.0.1", int(url.rpartition(":")[2]), limits, IdleConnections())


async def test_an_engine_whose_connections_are_all_in_use_still_gets_its_probe() -> None:
    async with running_rig(max_engine_connections=1, probe_interval_s=0.02) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefill.next_request()
        (engine,) = rig.router.services.engines[Role.PREFILL]
        await until(lambda: rig.prefill.num_connections == 2 or not engine.is_healthy)
        assert engine.is_healthy
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200


async def test_a_probe_takes_no_requests_connection() -> None:
    async with running_rig(max_engine_connections=1, probe_interval_s=0.02) as rig:
        pools = [engine.pool for engine in rig.router.services.all_engines()]
        for engine in (rig.prefill, rig.decode):
            engine.health_status = None
        await asyncio.sleep(0.1)  # Probes that are answered are over by now, or the test proves nothing.
        await until(lambda: all(pool.num_busy == 1 for pool in pools))
        assert (await (await rig.client()).post(COMPLETIONS, PROMPT)).status == 200
        for engine in (rig.prefill, rig.decode):
            engine.health_status = 200
            for writer in engine.open_connections:
                writer.transport.abort()


@pytest.mark.parametrize("is_connected", [False, True])
async def test_a_probe_that_is_given_up_takes_no_requests_connection_either(*, is_connected: bool) -> None:
    """Its connection is closed a turn of the loop later: a request may come in between."""
    async with silent_engine() as url:
        pool = pool_of(url, max_connections=1)
        probe = pool.send(GET, Hearer(), is_exempt=True)
        await until(lambda: not is_connected or probe.connection is not None)
        probe.close()
        hearer = Hearer()
        request = pool.send(GET, hearer)
        await until(lambda: request.connection is not None or hearer.lost.done())
        assert not hearer.lost.done()
        refused = Hearer()
        pool.send(GET, refused)
        assert "all 1 connections are in use" in (await asyncio.wait_for(refused.lost, PATIENCE_S)).reason
        await pool.close()


async def test_a_connection_that_is_being_made_counts() -> None:
    async with silent_engine() as url:
        pool = pool_of(url, max_connections=2)
        hearers = [Hearer() for _ in range(3)]
        for hearer in hearers:
            pool.send(GET, hearer)
        await asyncio.sleep(0)  # A refusal comes in the next turn of the loop.
        assert [hearer.lost.done() for hearer in hearers] == [False, False, True]
        assert "all 2 connections are in use" in hearers[2].lost.result().reason
        await pool.close()


async def test_a_connection_that_has_just_been_made_counts_once() -> None:
    async with silent_engine() as url:
        pool = pool_of(url, max_connections=2)
        first = pool.send(GET, Hearer())
        await until(lambda: first.connection is not None)
        assert pool.num_busy == 1
        await pool.close()


async def test_a_connection_that_a_probe_has_left_is_not_one_more_for_requests() -> None:
    async with running_rig(max_engine_connections=1, probe_interval_s=0.02) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefill.next_request()
        pools = [engine.pool for engine in rig.router.services.all_engines()]
        await until(lambda: rig.prefill.num_connections == rig.decode.num_connections == 2)
        await until(lambda: all(pool.num_busy == 1 for pool in pools))
        second = await send(rig)
        async with asyncio.timeout(PATIENCE_S):
            refused = await second.receive()
        assert (refused.status, len(rig.decode.seen)) == (503, 1)
        assert b"all 1 connections are in use" in refused.body
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await client.receive()).status == 200


async def test_connections_that_were_idle_for_too_long_keep_no_request_out() -> None:
    async with running_rig(max_engine_connections=1, engine_idle_s=0.05) as rig:
        client = await rig.client()
        for _ in range(2):
            assert (await client.post(COMPLETIONS, PROMPT)).status == 200
            await asyncio.sleep(0.1)  # Else they are not old enough, and the test proves nothing.
