"""A page's line, however its application ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from pdcluster_protocol.access import AccessLine
from pdcluster_protocol.launch import ForwardedHeader
from pdcluster_router.core.clients.client_address import ClientAddresses
from pdcluster_router.core.clients.room import Room
from pdcluster_router.front.pages import LoggedPages, page_of
from pdcluster_router.front.server_protocol import ROUTER_STATE

pytestmark = pytest.mark.anyio


class Log:
    """An access log that only keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[AccessLine] = []

    def ended(self, line_of: Callable[[], AccessLine]) -> None:
        self.lines.append(line_of())


async def line_of(
    app: Callable[[Scope, Receive, Send], Any], *messages: Message, room: Room | None = None
) -> AccessLine:
    """Of one request, whose client says ``messages``."""
    room = room or Room(1 << 20)
    log, said = Log(), list(messages)
    addresses = ClientAddresses([], ForwardedHeader.X_FORWARDED_FOR)
    services = SimpleNamespace(now=lambda: 1.0)
    router = SimpleNamespace(access_log=log, addresses=addresses, services=services, room=room)
    asked = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "client": ("192.0.2.1", 7)}
    scope = {**asked, "state": {ROUTER_STATE: router}}

    async def receive() -> Message:
        return said.pop(0)

    async def send(_: Message) -> None: ...

    with suppress(asyncio.CancelledError, RuntimeError):
        await LoggedPages(app)(scope, receive, send)
    (line,) = log.lines
    return line


@pytest.mark.parametrize("error", [asyncio.CancelledError, RuntimeError])
async def test_a_page_that_is_broken_off_has_a_line_without_a_status(error: type[BaseException]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    line = await line_of(app)
    assert (line.status, line.outcome) == (None, "lost")


async def test_a_client_that_leaves_before_the_answer_is_gone() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()
        await send({"type": "http.response.start", "status": 400})
        await send({"type": "http.response.body"})

    line = await line_of(app, {"type": "http.request", "body": b"abc"}, {"type": "http.disconnect"})
    assert (line.status, line.outcome, line.bytes_in) == (None, "client_gone", 3)


async def test_a_client_that_leaves_after_the_answer_has_had_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await send({"type": "http.response.body", "body": b"c"})
        await receive()

    line = await line_of(app, {"type": "http.disconnect"})
    assert (line.status, line.outcome, line.bytes_out) == (200, "ok", 3)


async def test_a_bug_has_no_outcome_as_on_the_hot_paths() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"Internal Server Error"})
        raise RuntimeError

    line = await line_of(app)
    assert (line.status, line.outcome) == (500, None)


@pytest.mark.parametrize("error", [None, asyncio.CancelledError, RuntimeError])
@pytest.mark.parametrize(
    ("num_bytes", "is_held", "has_room"),
    [
        (0, False, True),
        (64 << 10, False, True),
        ((64 << 10) + 1, True, True),
        (3 << 20, True, True),
        (5 << 20, False, False),
    ],
)
async def test_a_large_answer_has_room_until_its_page_ends_however_that_is(
    error: type[BaseException] | None, num_bytes: int, *, is_held: bool, has_room: bool
) -> None:
    room = Room(6 << 20)
    seen: list[bool | int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(page_of(HTTPConnection(scope)).hold(num_bytes, "a key"))
        seen.append(room.used_bytes)
        if error is not None:
            raise error

    await line_of(app, room=room)
    assert seen == [has_room, num_bytes if is_held else 0]
    assert room.used_bytes == 0
