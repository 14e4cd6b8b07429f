"""Any legal requests, cut at any bytes: one answer for each, the same one, and what they say is what was read."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from drawn import drawn
from pdcluster_router.core.apis.client_apis import REQUEST_PATHS
from pdcluster_router.core.clients.room import Room
from pdcluster_router.front.clients import Clients
from pdcluster_router.front.server_protocol import ROUTER_STATE, RouterProtocol
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.http.reading import PIECE_BYTES, SLICE_BYTES
from pdcluster_router.settings.router_settings import build_settings


class Loop:
    """Calls what is due when it is told to; its time stands still."""

    def __init__(self) -> None:
        self.due: list[tuple[Callable[..., None], tuple[object, ...]]] = []

    def time(self) -> float:
        return 0.0

    def call_soon(self, callback: Callable[..., None], *args: object) -> None:
        self.due.append((callback, args))

    def call_later(self, delay: float, callback: Callable[..., None], *args: object) -> SimpleNamespace:
        return SimpleNamespace(cancel=lambda: None)

    def run(self) -> None:
        while self.due:
            callback, args = self.due.pop(0)
            callback(*args)


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        address = ("127.0.0.1", 8000)
        ends = {"getsockname": lambda: address, "getpeername": lambda: address, "fileno": lambda: 7}
        super().__init__({"sockname": address, "socket": SimpleNamespace(**ends)})
        self.written = b""
        self.is_reading_paused = False
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False


class Stayers:
    """Takes the place of ``Leavers`` where no client leaves."""

    def __init__(self) -> None:
        self.watched: set[int] = set()

    def watch(self, descriptor: int, _: object) -> None:
        assert descriptor not in self.watched, "watched twice"
        self.watched.add(descriptor)

    def forget(self, descriptor: int) -> None:
        self.watched.discard(descriptor)


class EchoRouter:
    """Answers with what it was asked."""

    def __init__(self) -> None:
        self.settings = build_settings(prefill_urls=["http://p:1"], decode_urls=["http://d:1"])
        self.room = Room(self.settings.max_buffered_bytes)
        self.clients = Clients(10)
        self.leavers = Stayers()
        self.is_leaving = False

    def is_internal(self, port: int) -> bool:
        return False

    def paths_and_cycles(self, client: object, *, is_internal: bool) -> tuple[frozenset[bytes], type[HotCycle]]:
        return REQUEST_PATHS, HotCycle

    def admit(self, cycle: HotCycle) -> None:
        return None

    def max_body_bytes(self, *, is_internal: bool) -> int:
        return 1 << 20

    def dispatch(self, cycle: HotCycle) -> None:
        names = [name.decode() for name, _ in cycle.headers if name.startswith(b"x-")]
        cycle.answer(200, json.dumps([names, bytes(cycle.take_body()).decode()]).encode())


@dataclass(frozen=True)
class Sent:
    raw: bytes
    body: str


NEXT = "POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-length: 0\r\n\r\n"
BODIES = st.one_of(st.text(st.characters(codec="ascii"), max_size=40), st.just(NEXT), st.just(NEXT * 2))


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    """A POST with or without an upgrade that is offered, with a length or in chunks, with or without trailers."""
    body = draw(BODIES)
    target = draw(st.sampled_from(["/v1/completions", "http://a/v1/completions", "/v1/completions?x"]))
    lines = ["host: a", "x-request-id: id", "x-a: 1"]
    lines += draw(
        st.sampled_from(
            [
                [],
                ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAE"],
                ["Upgrade: websocket", "Connection: keep-alive, upgrade"],
                ["connection: x-hop", "x-hop: 1"],
            ]
        )
    )
    if draw(st.booleans()):
        framed, framing = body, f"content-length: {len(body)}"
    else:
        size = draw(st.integers(1, 50))
        chunks = [body[at : at + size] for at in range(0, len(body), size)]
        trailers = draw(st.sampled_from(["", "x-trailer: 1\r\n", "x-t: 1\r\nx-u: 2\r\n"]))
        framed = "".join(f"{len(chunk):x}\r\n{chunk}\r\n" for chunk in chunks) + f"0\r\n{trailers}\r\n"
        framing = "transfer-encoding: chunked"
    head = "\r\n".join([f"POST {target} HTTP/1.1", *lines, framing])
    return Sent(f"{head}\r\n\r\n{framed}".encode(), body)


def answers_to(pieces: list[bytes]) -> tuple[bytes, EchoRouter]:
    router, loop, transport = EchoRouter(), Loop(), Transport()
    connection = connected(router, loop, transport)
    for piece in pieces:
        connection.data_received(piece)
        loop.run()
    assert not transport.is_closed
    assert not transport.is_reading_paused
    assert not router.leavers.watched, "a connection that is read is watched"
    return transport.written, router


def connected(router: EchoRouter, loop: Loop, transport: Transport) -> RouterProtocol:
    config = Config(_no_app, http=RouterProtocol, ws="none", log_config=None)
    config.load()
    state: dict[str, Any] = {ROUTER_STATE: router}
    connection = RouterProtocol(config, ServerState(), state, loop)  # type: ignore[arg-type]  # all that it needs of one
    connection.connection_made(transport)
    return connection


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request of this test goes to the application")


@settings(max_examples=drawn(300), deadline=None)
@given(sent=st.lists(requests(), min_size=1, max_size=3), data=st.data())
def test_requests_that_are_cut_anywhere_get_one_answer_each(sent: list[Sent], data: st.DataObject) -> None:
    raw = b"".join(one.raw for one in sent)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=8)))
    pieces = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    written, router = answers_to(pieces)
    expected = [json.dumps([["x-request-id", "x-a"], one.body]).encode() for one in sent]
    assert written.count(b"HTTP/1.1 200 OK\r\n") == written.count(b"HTTP/1.1 ") == len(sent)
    assert [answer.partition(b"\r\n\r\n")[2] for answer in written.split(b"HTTP/1.1 200 OK\r\n")[1:]] == expected
    assert router.room.used_bytes == 0


def test_a_request_in_single_bytes_is_answered_as_one_in_one_piece() -> None:
    upgrade = "connection: upgrade\r\nupgrade: h2c\r\nx-request-id: id\r\ncontent-length: "
    raw = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{upgrade}{len(NEXT)}\r\n\r\n{NEXT}".encode()
    assert answers_to([bytes([byte]) for byte in raw])[0] == answers_to([raw])[0]


def test_a_pause_begins_with_an_answer_and_ends_with_the_next_byte() -> None:
    loop = Loop()
    connection = connected(EchoRouter(), loop, Transport())
    for _ in range(2):
        connection.data_received(NEXT.encode())
        loop.run()
        assert connection.idle_since is not None
        connection.data_received(b"\r\n")
        assert connection.idle_since is None


class SlowParser(RouterProtocol):
    """For which every look at the clock is a millisecond later than the last."""

    looks = itertools.count()

    def now(self) -> float:
        return next(self.looks) / 1000


def test_many_short_requests_of_one_read_stop_nobody_else_for_long() -> None:
    router, loop, transport = EchoRouter(), Loop(), Transport()
    config = Config(_no_app, http=SlowParser, ws="none", log_config=None)
    config.load()
    connection = SlowParser(config, ServerState(), {ROUTER_STATE: router}, loop)  # type: ignore[arg-type]  # as above
    connection.connection_made(transport)
    num_requests = SLICE_BYTES // len(NEXT)
    connection.data_received(NEXT.encode() * num_requests)
    assert transport.written.count(b" 200 OK") <= 3 * PIECE_BYTES // len(NEXT)
    loop.run()
    assert transport.written.count(b" 200 OK") == num_requests


def test_a_page_that_asks_for_its_body_after_its_client_has_left_ends_no_watch_of_another_client() -> None:
    """The next connection may have the number of the one that is lost."""
    router, loop = EchoRouter(), Loop()
    lost = connected(router, loop, Transport())
    lost.flow.pause_reading()
    lost.connection_lost(None)
    assert not router.leavers.watched
    connected(router, loop, Transport()).flow.pause_reading()
    lost.flow.resume_reading()
    assert router.leavers.watched, "the other client's end would not be noticed"
