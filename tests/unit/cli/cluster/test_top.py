"""``pdcluster top`` shows what it can of each router, whatever that router answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import pytest

from pdcluster_cli.cluster.top import main
from pdcluster_protocol.pool_page import POOL_PATH
from pdcluster_protocol.status_page import STATUS_PATH

pytestmark = pytest.mark.anyio

POOL: Final[dict[str, Any]] = {
    "discovery": {"kind": "static"},
    "policy": "affinity",
    "requests": {"running": 3, "queued": {}, "backlog_tokens": {}},
    "failures": {"seconds": 300.0, "kinds": {}},
    "revisions": [],
    "engines": [],
}


@asynccontextmanager
async def router(pages: Mapping[str, bytes]) -> AsyncIterator[str]:
    """A router that has these pages alone."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body = pages.get(path)
        head = b"HTTP/1.1 200 OK" if body is not None else b"HTTP/1.1 404 Not Found"
        writer.write(b"%b\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body or b""), body or b""))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def look(pages: Mapping[str, bytes]) -> int:
    async with router(pages) as url:
        return await asyncio.to_thread(main, ["--once", "--url", url])


async def test_a_router_of_an_earlier_version_shows_its_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert await look({POOL_PATH: msgspec.json.encode(POOL)}) == 0
    text = capsys.readouterr().out
    assert ": 3 requests run" in text
    assert "It is of an earlier version: its last requests are not told." in text


async def test_a_router_of_this_version_is_asked_for_nothing_older(capsys: pytest.CaptureFixture[str]) -> None:
    newest = {"pool": {**POOL, "policy": "x"}, "recent": []}
    assert await look({STATUS_PATH: msgspec.json.encode(newest), POOL_PATH: b"{}"}) == 0
    text = capsys.readouterr().out
    assert ": 3 requests run" in text
    assert "earlier version" not in text


async def test_what_knows_neither_page_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert await look({}) == 2
    assert "it answered 404: is this the internal port" in capsys.readouterr().out


@pytest.mark.parametrize("path", [STATUS_PATH, POOL_PATH])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"[]",
        b'{"pool":1}',
        b'{"discovery":{"kind":"\xff"},"pool":{"policy":"\xff"}}',
        b'{"x":' + b"[" * 9999,
    ],
)
async def test_an_answer_that_cannot_be_read_is_told(
    path: str, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    await look({path: body})
    assert ": its answer cannot be read (" in capsys.readouterr().out
