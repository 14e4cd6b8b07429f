"""The campaign's client against servers of a few lines: it finds a hang, a cut, and leaves when it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import pytest

from campaign.client import Leave, Order, ask
from campaign.questions import Question

pytestmark = pytest.mark.anyio

Handler: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: {}\n\n"
CHUNK = b"a\r\n" + EVENT + b"\r\n"


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def order(leave: Leave | None = None, timeout_s: float | None = None) -> Order:
    return Order(0, Question((1, 2), 4), True, timeout_s, leave)


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def begins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if await reader.read(1):
        writer.write(STREAM + CHUNK)
        with suppress(ConnectionError):
            await reader.read()
    writer.close()


async def test_a_server_that_never_answers_is_a_hang() -> None:
    async with serving(never) as port:
        observed = await ask(port, order(), "id", give_up_s=0.05)
    assert (observed.is_hung, observed.has_left, observed.status) == (True, False, None)


async def test_an_answer_that_does_not_go_on_is_a_hang() -> None:
    async with serving(begins) as port:
        observed = await ask(port, order(), "id", give_up_s=8.0)
    assert (observed.is_hung, observed.status, observed.body) == (True, 200, EVENT)


async def test_a_client_leaves_before_the_first_byte_or_after_some() -> None:
    async with serving(begins) as port:
        early = await ask(port, order(Leave(after_s=0.0)), "id", give_up_s=9)
        later = await ask(port, order(Leave(after_bytes=1, is_reset=True)), "id", give_up_s=9)
    assert [seen.has_left for seen in (early, later)] == [True, True]
    assert [seen.is_hung or seen.is_whole for seen in (early, later)] == [False, False]
    assert later.body


@pytest.mark.parametrize("length", [b"content-length: 5", b"transfer-encoding: chunked"])
async def test_an_answer_that_is_cut_is_not_whole(length: bytes) -> None:
    async def cuts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n5")
        writer.close()

    async with serving(cuts) as port:
        observed = await ask(port, order(), "id", give_up_s=9)
    assert (observed.status, observed.is_whole, observed.is_hung) == (200, False, False)
    assert observed.cut


async def test_a_port_where_nobody_listens_is_no_hang() -> None:
    async with serving(never) as port:
        pass
    observed = await ask(port, order(), "id", give_up_s=9)
    assert (observed.status, observed.is_hung) == (None, False)


async def test_a_whole_answer_is_whole_and_the_request_carries_its_id_and_its_limit() -> None:
    heads: list[bytes] = []

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(STREAM + b"2\r\nok\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with serving(answers) as port:
        observed = await ask(port, order(timeout_s=1.5), "id-7", give_up_s=9)
    assert (observed.is_whole, observed.body) == (True, b"ok")
    assert b"x-request-id: id-7\r\n" in heads[0]
    assert b"x-request-timeout: 1.500\r\n" in heads[0]
