"""The misbehaving proxy: invisible when calm, and each deed is what the other side really meets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from campaign.proxy import FaultProxy
from campaign.schedule import Deed
from fakes.http import read_body, read_head, request_bytes
from fakes.router import until
from integration.ports import fresh_port

pytestmark = pytest.mark.anyio

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def proxied(gate: asyncio.Event | None = None, arrived: asyncio.Event | None = None) -> AsyncIterator[FaultProxy]:
    """A proxy before a server that answers ``ok`` to every request that has arrived, once the gate is open."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await read_body(reader, await read_head(reader))
                if arrived:
                    arrived.set()
                if gate:
                    await gate.wait()
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = FaultProxy(fresh_port(), server.sockets[0].getsockname()[1], random.Random(1))
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


async def post(proxy: FaultProxy, method: str = "POST", times: int = 1) -> list[int]:
    """The statuses of so many requests on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        statuses = []
        for _ in range(times):
            writer.write(request_bytes("/", b"{}", method=method))
            message = await read_body(reader, await read_head(reader))
            statuses.append(message.status)
        return statuses
    finally:
        writer.transport.abort()


async def test_a_calm_proxy_passes_requests_and_is_calm_after_answers_of_500_and_a_closed_port() -> None:
    """A probe of health passes while requests are answered with 500."""
    async with proxied() as proxy:
        assert await post(proxy, times=3) == [200, 200, 200]
        async with proxy.doing(Deed.FAIL_500):
            assert (await post(proxy), await post(proxy, "GET")) == ([500], [200])
        assert (await post(proxy), proxy.num_met) == ([200], 1)
        async with proxy.doing(Deed.REFUSE):
            with pytest.raises(ConnectionRefusedError):
                await post(proxy)
        assert await post(proxy) == [200]


@pytest.mark.parametrize("deed", [Deed.REFUSE, Deed.CUT])
async def test_a_proxy_that_refuses_or_cuts_has_met_the_connections_that_were_open(deed: Deed) -> None:
    async with proxied() as proxy:
        async with proxy.doing(deed):
            assert proxy.num_met == 0
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        await until(lambda: len(proxy._connections) == 1)
        async with proxy.doing(deed):
            assert await reader.read() == b""
        assert proxy.num_met == 1
        writer.close()


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_proxy_that_hangs_answers_nobody_and_cuts_in_the_end(method: str) -> None:
    async with proxied() as proxy:
        async with proxy.doing(Deed.HANG):
            asking = asyncio.create_task(post(proxy, method))
            await until(lambda: proxy.num_met == 1)
            done, _ = await asyncio.wait([asking], timeout=0.05)
            assert not done
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asking
        assert await post(proxy, method) == [200]


async def test_a_slow_proxy_answers_in_the_end() -> None:
    async with proxied() as proxy, proxy.doing(Deed.SLOW):
        begin = asyncio.get_running_loop().time()
        assert await post(proxy) == [200]
        assert asyncio.get_running_loop().time() - begin >= 0.05


async def test_a_proxy_that_cuts_ends_what_runs_and_what_comes() -> None:
    gate, arrived = asyncio.Event(), asyncio.Event()
    async with proxied(gate, arrived) as proxy:
        running = asyncio.create_task(post(proxy))
        await arrived.wait()
        async with proxy.doing(Deed.CUT):
            for asking in (running, asyncio.create_task(post(proxy))):
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await asking
        gate.set()
        assert await post(proxy) == [200]


async def test_a_proxy_before_a_dead_server_cuts_and_a_closed_one_leaves_no_port() -> None:
    proxy = FaultProxy(fresh_port(), fresh_port(), random.Random(1))
    await proxy.listen()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await post(proxy)
    await proxy.close()
    with pytest.raises(ConnectionRefusedError):
        await post(proxy)
