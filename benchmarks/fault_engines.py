"""Engines for ``router_faults``: without a model, each on a port of its own, with a fault that can be turned on.

They take part in each router's way of P/D, as ``router_contenders`` has them:

    our router      decode reserves at the router, and answers after the router has told it that prefill is done
    sglang-router   both have the request at once; decode answers after prefill has done the same ``bootstrap_room``
    vllm-router     prefill comes first, so decode answers at once
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from benchmarks.router import ANSWER_FIELDS, SECRET, request_bytes, reservation_for

from pdcluster_protocol.labels import Role
from pdcluster_protocol.metaserver import METASERVER_PATH, SEAL_HEADER

EVENTS: Final = tuple(
    b"data: "
    + json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": f" t{i}", "finish_reason": why}]}).encode()
    + b"\n\n"
    for i, why in enumerate((*(None,) * 7, "length"))
)
DONE: Final = b"data: [DONE]\n\n"
STREAM: Final = b"".join(EVENTS) + DONE
"""The body of a whole stream."""
PLAIN: Final = json.dumps(ANSWER_FIELDS).encode()
"""A whole answer that is no stream."""
DIES_AFTER_S: Final = 0.2
"""How long an engine works on a request before it dies."""
NUM_BEFORE_DEATH: Final = 3
"""Events of a stream that is cut off."""
ROOM_S: Final = 60.0
"""How long decode waits for prefill where no router tells it that prefill has failed. SGLang waits for 300 s."""
_LOOK_S: Final = 0.01
"""How often an engine looks whether its caller has hung up."""
_INFO: Final = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
"""The answer to each GET, such as ``/health`` and ``/v1/models``."""


class Fault(StrEnum):
    """The fault of an engine."""

    NONE = "nothing"
    DOWN = "is down: its port is closed"
    REFUSES = "answers 500 at once"
    SILENT = "takes requests and says nothing"
    DIES = "dies before its first word"
    DIES_IN_ANSWER = "dies in the middle of its answer"


@dataclass(frozen=True, slots=True)
class Request:
    """A router's request to an engine."""

    method: bytes
    body: dict[str, Any]

    @property
    def is_question(self) -> bool:
        return self.method == b"GET"


@dataclass
class Rooms:
    """The hand-overs that prefill has done, by ``bootstrap_room``."""

    done: dict[int, asyncio.Event] = field(default_factory=dict)

    def of(self, room: int) -> asyncio.Event:
        return self.done.setdefault(room, asyncio.Event())

    async def has(self, room: int | None) -> bool:
        """Whether prefill has done ``room``, after ``ROOM_S`` at most. ``room`` is None where the router asks prefill
        first."""
        if room is None:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(self.of(room).wait(), ROOM_S)
        return self.of(room).is_set()


class Engine:
    """One engine. Event loop only. ``work_s``: prefill's for a prompt; ``event_s``: between two events of decode."""

    def __init__(self, role: Role, rooms: Rooms) -> None:
        self.role = role
        self.fault = Fault.NONE
        self.work_s = 0.02
        self.event_s = 0.01
        self.num_working = 0
        """Requests that it works on now."""
        self.url = ""
        self._rooms = rooms
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Its port is closed, and so are its connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def strike(self, fault: Fault) -> None:
        self.fault = fault
        if fault is Fault.DOWN:
            await self.stop()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _read(reader):
                if not await self._answered(request, reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _answered(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether it has answered. Else the router has hung up, or the engine is dead."""
        if request.is_question and self.fault is not Fault.SILENT:
            writer.write(json_answer(200, _INFO))
            return True
        work = asyncio.create_task(self._work(request, writer))
        try:
            with self._working(request):
                while not work.done() and not _has_hung_up(reader):
                    await asyncio.wait({work}, timeout=_LOOK_S)
            return work.done() and await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    @contextmanager
    def _working(self, request: Request) -> Iterator[None]:
        self.num_working += not request.is_question
        try:
            yield
        finally:
            self.num_working -= not request.is_question

    async def _work(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if self.fault is Fault.SILENT:
            await asyncio.Event().wait()
        if self.fault is Fault.REFUSES:
            writer.write(json_answer(500, b'{"error":{"message":"no","type":"server_error","code":500}}'))
            return True
        if self.fault is Fault.DIES:
            await asyncio.sleep(DIES_AFTER_S)
            return False
        return await (self._prefill if self.role is Role.PREFILL else self._decode)(request.body, writer)

    async def _prefill(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(self.work_s)
        self._rooms.of(body.get("bootstrap_room", 0)).set()
        writer.write(
            json_answer(200, json.dumps({**ANSWER_FIELDS, "kv_transfer_params": {"remote_host": "x"}}).encode())
        )
        return True

    async def _decode(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        params = body.get("kv_transfer_params") or {}
        has_kv = (
            await _reserved(params) if "metaserver" in params else await self._rooms.has(body.get("bootstrap_room"))
        )
        if not has_kv:
            writer.write(json_answer(500, b'{"error":{"message":"no KV came","type":"server_error","code":500}}'))
            return True
        return await (self._stream(writer) if body.get("stream") else self._say(writer))

    async def _say(self, writer: asyncio.StreamWriter) -> bool:
        answer = json_answer(200, PLAIN)
        writer.write(answer[: len(answer) // 2] if self.fault is Fault.DIES_IN_ANSWER else answer)
        await writer.drain()
        await asyncio.sleep(self.event_s)
        return self.fault is not Fault.DIES_IN_ANSWER

    async def _stream(self, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number, event in enumerate((*EVENTS, DONE)):
            if number == NUM_BEFORE_DEATH and self.fault is Fault.DIES_IN_ANSWER:
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(self.event_s)
        writer.write(b"0\r\n\r\n")
        return True


def json_answer(status: int, body: bytes) -> bytes:
    """An HTTP answer of JSON."""
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _has_hung_up(reader: asyncio.StreamReader) -> bool:
    return reader.at_eof() or reader.exception() is not None


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """None: the connection has ended, or speaks HTTP/2, which sglang-router tries first."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    method = head.partition(b" ")[0]
    if method == b"PRI":
        return None
    lengths = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    return Request(method, json.loads(body) if body else {})


async def _reserved(params: dict[str, Any]) -> bool:
    """Tells the router which blocks are reserved; whether prefill has then written them."""
    host, _, port = str(params["metaserver"]).split("/")[2].partition(":")
    body = reservation_for(params)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request_bytes(METASERVER_PATH, body, f"{SEAL_HEADER}: {SECRET.seal_call(body)}\r\n"))
        with suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            return b'"ok"' in await reader.readexactly(length)
        return False
    finally:
        writer.transport.abort()
