"""A proxy between the operator and the API server that does to it what networks and busy servers do. Seeded.

    operator -- http, loopback --> proxy -- TLS --> kube-apiserver

A call is answered 409, 429, 500 or 503 without being done; or it never arrives; or it is done and its answer gets lost.
A watch may also be told that its history is gone (410), or end in the middle. Everything is counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
from collections import Counter
from enum import Enum
from typing import Any, Final

import aiohttp
from aiohttp import web

from control_plane.plane import ControlPlane
from patience import PATIENCE_S


class Fault(Enum):
    """The value of an answer's is its status."""

    CONFLICT = 409
    BUSY = 429
    BROKEN = 500
    UNAVAILABLE = 503
    NEVER_ARRIVES = "never arrives"
    ANSWER_LOST = "answer lost"
    HISTORY_GONE = 410
    WATCH_ENDS = "watch ends"
    WATCH_BREAKS = "watch breaks"


_ANY: Final = (Fault.BUSY, Fault.BROKEN, Fault.UNAVAILABLE, Fault.NEVER_ARRIVES)
OF_WRITES: Final = (*_ANY, Fault.CONFLICT, Fault.ANSWER_LOST)
OF_WATCHES: Final = (*_ANY, Fault.HISTORY_GONE, Fault.WATCH_ENDS)
_REASONS: Final = {
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}
_DROPPED: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})
_START_LIMIT_S: Final = PATIENCE_S
_WATCH_LIMIT_S: Final = 1.0
_HOLD_POLL_S: Final = 0.05


class FaultyProxy:
    """One thread with a loop of its own; ``close`` joins it. A test sets ``rate`` and ``is_down`` at any time."""

    def __init__(self, plane: ControlPlane, seed: int) -> None:
        """It listens at ``url``, and does no harm yet."""
        self._plane = plane
        self._random = random.Random(seed)
        self.rate = 0.0
        """Share of the calls that something happens to."""
        self.is_down = False
        """Nobody gets through, and whoever was is cut off."""
        self.breaks_watches = False
        """Every watch that begins is told of an error that no new list mends, as when etcd has no leader."""
        self.num_injected: Counter[Fault] = Counter()
        self.holds_status = False
        """A status that arrives waits here, and goes on its way late, when this is False again."""
        self.num_held = 0
        self.num_cut = 0
        """Connections that ``cut`` has ended."""
        self.url = ""
        self._open: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.name = "faulty proxy"
        self._thread.start()
        assert self._is_started.wait(_START_LIMIT_S), "the proxy does not start"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def cut(self) -> None:
        """Every connection ends now, in the middle of whatever it is."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(10)

    async def _cut(self) -> None:
        for transport in list(self._open):
            self.num_cut += 1
            transport.abort()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        context = ssl.create_default_context(cafile=self._plane.ca_file)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._is_started.set()
            await self._stop.wait()
            await self._cut()
            await runner.cleanup()
            await _end_all_others()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        self._open.add(transport)
        try:
            return await self._answer(request, transport)
        except (aiohttp.ClientError, OSError):
            transport.abort()
            return web.Response()  # goes nowhere
        finally:
            self._open.discard(transport)

    async def _answer(self, request: web.BaseRequest, transport: asyncio.Transport) -> web.StreamResponse:
        body = await request.read()
        await self._hold(request)
        fault = self._draw(request)
        if self.is_down or fault is Fault.NEVER_ARRIVES:
            raise ConnectionResetError
        if fault in (Fault.HISTORY_GONE, Fault.WATCH_BREAKS):
            return _error_event(410 if fault is Fault.HISTORY_GONE else 500)
        if fault is not None and isinstance(fault.value, int):
            return _refusal(fault.value)
        async with self._ask(request, body) as upstream:
            if fault is Fault.ANSWER_LOST:
                await upstream.read()
                raise ConnectionResetError
            return await self._relay(request, upstream, ends=fault is Fault.WATCH_ENDS)

    async def _hold(self, request: web.BaseRequest) -> None:
        if not self.holds_status or request.method != "PATCH" or not request.path.endswith("/status"):
            return
        self.num_held += 1
        while self.holds_status:
            await asyncio.sleep(_HOLD_POLL_S)

    def _draw(self, request: web.BaseRequest) -> Fault | None:
        if self.breaks_watches and "watch" in request.query:
            self.num_injected[Fault.WATCH_BREAKS] += 1
            return Fault.WATCH_BREAKS
        if self._random.random() >= self.rate:
            return None
        is_watch = "watch" in request.query
        choices = OF_WATCHES if is_watch else _ANY if request.method == "GET" else OF_WRITES
        fault = self._random.choice(choices)
        self.num_injected[fault] += 1
        return fault

    def _ask(self, request: web.BaseRequest, body: bytes) -> Any:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        url = self._plane.url + request.raw_path
        never = aiohttp.ClientTimeout(total=None)
        return self._session.request(request.method, url, data=body or None, headers=headers, timeout=never)

    async def _relay(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, *, ends: bool
    ) -> web.StreamResponse:
        headers = {name: value for name, value in upstream.headers.items() if name.lower() not in _DROPPED}
        response = web.StreamResponse(status=upstream.status, headers=headers)
        await response.prepare(request)
        try:
            async with asyncio.timeout(self._random.uniform(0, _WATCH_LIMIT_S) if ends else None):
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
        except TimeoutError as error:
            raise ConnectionResetError from error
        await response.write_eof()
        return response


async def _end_all_others() -> None:
    """Relays of watches do not notice that both of their ends are gone."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _refusal(code: int) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": _REASONS[code]}
    headers = {"Retry-After": "1"} if code == 429 else {}
    return web.json_response({**body, "message": "a fault of the test"}, status=code, headers=headers)


def _error_event(code: int) -> web.Response:
    """As the API server says it in a stream. After 410 the client has to list anew."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": _REASONS[code]}
    event = {"type": "ERROR", "object": {**status, "message": "a fault of the test"}}
    return web.Response(text=json.dumps(event) + "\n", content_type="application/json")
