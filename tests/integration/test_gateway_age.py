"""A gateway's connection that has grown old: streams on it go on, and the next one comes on a new connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from grpc import aio

from fakes.router import COMPLETIONS, running_rig, until
from integration.ports import fresh_port
from patience import PATIENCE_S
from pdcluster_router.core.requests.consultation import BodyMode
from pdcluster_router.front.picker import server
from pdcluster_router.front.picker.messages import METHOD, SERVICE, ProcessingRequest, ProcessingResponse

pytestmark = pytest.mark.anyio

AGE_MS: Final = 200
LOOK_S: Final = 0.02
HEALTH: Final = "/grpc.health.v1.Health/Check"


@asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[tuple[int, list[asyncio.Task[None]]]]:
    """A port that leads to ``port``, and a task for each connection, which is done when the router has closed it."""
    connections: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, to_writer))
        connections.append(asyncio.create_task(_pump(to_reader, writer)))
        await _pump(reader, to_writer)

    relay = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield relay.sockets[0].getsockname()[1], connections
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*connections)
        relay.close()
        await relay.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while said := await reader.read(1 << 16):
            writer.write(said)
    writer.close()


def head_of_a_request() -> Any:
    fields = {":method": "POST", ":path": COMPLETIONS, "content-type": "application/json"}
    headers = [{"key": name, "raw_value": value.encode()} for name, value in fields.items()]
    modes = {"request_body_mode": BodyMode.DUPLEX, "response_body_mode": BodyMode.DUPLEX}
    return ProcessingRequest(request_headers={"headers": {"headers": headers}}, protocol_config=modes)


@pytest.mark.costly
async def test_a_stream_outlives_the_age_of_its_connection_and_the_next_one_comes_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_AGE_MS", AGE_MS)
    async with (
        running_rig(picker_port=(port := fresh_port())),
        relay_to(port) as (relay_port, connections),
        aio.insecure_channel(f"127.0.0.1:{relay_port}") as channel,
        asyncio.timeout(PATIENCE_S),
    ):
        process = channel.stream_stream(
            f"/{SERVICE}/{METHOD}", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        old = process()
        await old.write(head_of_a_request())
        while len(connections) < 2:
            assert await channel.unary_unary(HEALTH)(b"") == b"\x08\x01"
            await asyncio.sleep(LOOK_S)
        assert [one.done() for one in connections[:2]] == [False, False]
        await old.write(ProcessingRequest(request_body={"body": b"{", "end_of_stream": True}))
        assert (await old.read()).immediate_response.status.code == 400
        assert await old.read() is aio.EOF
        await until(connections[0].done)
