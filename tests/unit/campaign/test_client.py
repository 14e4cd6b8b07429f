"""The campaign's client against a server of a few lines: it finds a hang and a cut, and leaves when it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import pytest

from campaign.client import Leave, Order, ask
from campaign.outcomes import Observed
from campaign.questions import Question

pytestmark = pytest.mark.anyio

OK: Final = b"HTTP/1.1 200 OK\r\n"
STREAM: Final = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT: Final = b"data: {}\n\n"
BEGINS: Final = STREAM + b"a\r\n" + EVENT + b"\r\n"


@asynccontextmanager
async def answering(sent: bytes, *, closes: bool = False) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Its port, and the heads of its requests. It ends the connection if it ``closes``, else waits for the client."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(sent)
            await (writer.drain() if closes else reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heads


def order(leave: Leave | None = None, timeout_s: float | None = None) -> Order:
    return Order(0, Question((1, 2), 4), True, timeout_s, leave)


def told(seen: Observed) -> tuple[str, int | None, bytes]:
    flags = {"hung": seen.is_hung, "left": seen.has_left, "cut": bool(seen.cut), "whole": seen.is_whole}
    return " ".join(name for name, is_so in flags.items() if is_so), seen.status, seen.body


@pytest.mark.parametrize(
    ("sent", "leave", "give_up_s", "expected"),
    [
        (b"", None, 0.05, ("hung", None, b"")),
        pytest.param(BEGINS, None, 8.0, ("hung", 200, EVENT), marks=pytest.mark.long),
        (BEGINS, Leave(after_s=0.0), 9, ("left", None, b"")),
        (BEGINS, Leave(after_bytes=1, is_reset=True), 9, ("left", 200, EVENT)),
        (STREAM + b"2\r\nok\r\n0\r\n\r\n", None, 9, ("whole", 200, b"ok")),
    ],
)
async def test_an_answer_hangs_is_left_or_is_whole(
    sent: bytes, leave: Leave | None, give_up_s: float, expected: tuple[str, int | None, bytes]
) -> None:
    async with answering(sent) as (port, _):
        assert told(await ask(port, order(leave), "id", give_up_s=give_up_s)) == expected


@pytest.mark.parametrize("head", [STREAM, OK + b"content-length: 5\r\n\r\n"])
async def test_an_answer_that_is_cut_is_not_whole_and_a_closed_port_is_no_hang(head: bytes) -> None:
    async with answering(head + b"5", closes=True) as (port, _):
        assert told(await ask(port, order(), "id", give_up_s=9))[:2] == ("cut", 200)
    assert told(await ask(port, order(), "id", give_up_s=9)) == ("cut", None, b"")


async def test_a_request_carries_its_id_and_its_limit() -> None:
    async with answering(OK + b"content-length: 0\r\n\r\n") as (port, heads):
        await ask(port, order(timeout_s=1.5), "id-7", give_up_s=9)
    assert b"x-request-id: id-7\r\n" in heads[0]
    assert b"x-request-timeout: 1.500\r\n" in heads[0]
