"""A crowd on the internal port keeps no engine out: raw sockets, as anybody inside a cluster could open them."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fakes.certificates import Authority
from fakes.faults import Gate
from fakes.http import RawClient
from fakes.reservations import reservation_call, reservation_of
from fakes.router import COMPLETIONS, PROMPT, Rig, post, running_rig, send, until
from integration.router_scene import Scene, running_scene
from integration.test_router_internal_tls import files_of
from integration.tls_clients import ended
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

ELSEWHERE = ("127.0.0.9", 0)
"""Another machine than the engines'."""
HALF_A_CALL = b"POST /v1/metaserver HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"
NUM_HELD = 200
SAID: dict[str, bytes] = {"nothing": b"", "half a head": b"POST /v1", "half a call": HALF_A_CALL}


async def stranger(port: int | None, said: bytes = b"") -> RawClient:
    connection = await asyncio.open_connection("127.0.0.1", port, local_addr=ELSEWHERE)
    client = RawClient(*connection)
    with suppress(ConnectionError):
        await client.send(said)
    return client


@asynccontextmanager
async def crowd(rig: Rig, num: int, said: bytes) -> AsyncIterator[list[RawClient]]:
    strangers = [await stranger(rig.router.settings.internal_port, said) for _ in range(num)]
    yield strangers
    for one in strangers:
        one.leave()


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
async def test_a_crowd_makes_room_for_itself_and_engines_calls_get_through(said: bytes) -> None:
    async with running_rig(max_internal_connections=20) as rig:
        kept = await rig.internal()
        assert (await kept.get("/health")).status == 200
        async with crowd(rig, 200, said):
            await until(lambda: rig.router.callers.num_open == 20)
            assert [(await post(rig)).status for _ in range(5)] == [200] * 5
            assert len(rig.prefill.seen) == 5
            assert (await kept.get("/health")).status == 200
        assert (await rig.failures())["crowded_out"] > 0


async def test_a_call_that_waits_is_not_closed_for_a_crowd_of_its_own_address() -> None:
    async with running_rig(max_internal_connections=4) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefill.next_request()
        idle = [await rig.internal() for _ in range(50)]
        await ended(idle[0].reader)
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await asyncio.wait_for(client.receive(), PATIENCE_S)).status == 200


async def test_pages_are_read_while_every_place_waits_for_prefill() -> None:
    async with running_rig(max_internal_connections=3) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await send(rig) for _ in range(5)]
        for _ in clients:
            await rig.prefill.next_request()
        assert (await (await rig.internal()).get("/metrics")).status == 200
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await asyncio.wait_for(client.receive(), PATIENCE_S)).status for client in clients] == [200] * 5


async def test_a_client_that_takes_no_page_is_in_no_use(rig: Rig) -> None:
    """Its pages wait here for their turn: else a crowd could hold the port by reading nothing."""
    client = await rig.internal()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a transport for both ways
    await until(lambda: rig.connection_of(client) is not None)
    connection = rig.connection_of(client)
    while not connection.is_full:
        await client.send(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")
        await asyncio.sleep(0)
    assert not connection.is_in_use
    client.leave()


async def test_a_call_that_no_engine_has_sealed_is_in_no_use_and_one_that_waits_is(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig)
    params = (await rig.decode.next_request()).params or {}
    call, half = await rig.internal(), await rig.internal()
    await half.send(reservation_call(reservation_of(params))[:-1])
    await call.send(reservation_call(reservation_of(params)))
    await rig.prefill.next_request()
    assert [rig.connection_of(one).is_in_use for one in (call, half)] == [True, False]
    client.leave()


async def test_connections_without_an_agreement_count_as_all_do(authority: Authority, tmp_path: Path) -> None:
    settings: dict[str, Any] = files_of(authority, tmp_path / "internal")
    async with running_rig(**settings, max_internal_connections=10) as rig:
        async with crowd(rig, 100, b""):
            await until(lambda: rig.router.callers.num_open == 10)
            assert (await post(rig)).status == 200
        await until(lambda: rig.router.callers.num_open <= 1)


async def flood(port: int) -> None:
    """Ever new connections to the internal port that say nothing, ``NUM_HELD`` at most. Until it is cancelled."""
    held = deque[socket.socket]()
    try:
        while True:
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].bind(ELSEWHERE)
            held[-1].connect_ex(("127.0.0.1", port))
            if len(held) > NUM_HELD:
                held.popleft().close()
            await asyncio.sleep(0.001)
    finally:
        for one in held:
            one.close()


def num_descriptors(scene: Scene) -> int:
    return len(list(Path(f"/proc/{scene.pid}/fd").iterdir()))


async def test_engines_call_back_while_a_crowd_would_take_all_descriptors() -> None:
    async with running_scene("--on-prefill-failure=fail", descriptors=80) as scene:
        client, before = await scene.client(), num_descriptors(scene)
        flooding = asyncio.create_task(flood(int(scene.internal_url.rpartition(":")[2])))
        await until(lambda: num_descriptors(scene) > before + 20)
        async with asyncio.timeout(PATIENCE_S):
            answers = [await client.post(COMPLETIONS, PROMPT) for _ in range(20)]
        flooding.cancel()
        assert [answer.status for answer in answers] == [200] * 20
        assert len(scene.prefill.seen) == 20
