"""A proxy that misbehaves on demand, between the router and an engine, or between the engines and the metaserver.

It reads requests one by one, so that it can answer one itself; answers pass byte for byte. Without a deed it is
invisible but for one hop on loopback. ``stop_listening`` makes connecting fail as a dead process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from campaign.schedule import Deed

_HOST: Final = "127.0.0.1"
_ERROR_BODY: Final = b'{"error": {"message": "injected", "type": "server_error", "param": null, "code": 500}}'
_ANSWER_500: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_ERROR_BODY), _ERROR_BODY)
)
_SLOW_S: Final = (0.05, 1.5)
_CUT_S: Final = (0.0, 0.5)


class FaultProxy:
    """Listens on ``port``, speaks to ``upstream_port``. One event loop owns it."""

    def __init__(self, port: int, upstream_port: int, rng: random.Random) -> None:
        self.port = port
        self.num_met = 0
        """Requests and open connections that met a deed. Those that are refused come to no proxy."""
        self._upstream_port = upstream_port
        self._rng = rng
        self._deed: Deed | None = None
        self._calm = asyncio.Event()
        self._calm.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Connections are taken."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, _HOST, self.port)

    async def stop_listening(self) -> None:
        """Nobody listens, and every connection is cut."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self.cut_all()

    async def close(self) -> None:
        """No socket and no task is left."""
        await self.stop_listening()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut_all(self) -> None:
        """Every connection that exists ends now."""
        for task in self._connections:
            task.cancel()

    @asynccontextmanager
    async def doing(self, deed: Deed) -> AsyncIterator[None]:
        """Within the ``with`` everything that comes meets ``deed``."""
        self._deed = deed
        self._calm.clear()
        if deed in (Deed.REFUSE, Deed.CUT):
            self.num_met += len(self._connections)
        if deed is Deed.REFUSE:
            await self.stop_listening()
        if deed is Deed.CUT:
            self.cut_all()
        try:
            yield
        finally:
            self._deed = None
            self._calm.set()
            await self.listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._relay(reader, writer)
        finally:
            self._connections.discard(task)
            writer.transport.abort() if self._deed else writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_connection(_HOST, self._upstream_port)
        ways = {
            asyncio.create_task(self._requests(reader, writer, to_engine)),
            asyncio.create_task(_pass_on(from_engine, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_engine.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: asyncio.StreamWriter
    ) -> None:
        """Each request to the engine, unless a deed keeps it. Returns when the connection shall end."""
        while True:
            request = await _read_request(reader)
            if self._deed and (request.startswith(b"POST") or self._deed is Deed.HANG):
                self.num_met += 1
                if not await self._passes(self._deed, writer):
                    return
            engine.write(request)
            await engine.drain()

    async def _passes(self, deed: Deed, writer: asyncio.StreamWriter) -> bool:
        """Whether the request goes on to the engine, after what ``deed`` does to it."""
        match deed:
            case Deed.FAIL_500:
                writer.write(_ANSWER_500)
                await writer.drain()
                return False
            case Deed.HANG:
                await self._calm.wait()
                return False
            case Deed.SLOW:
                await asyncio.sleep(self._rng.uniform(*_SLOW_S))
            case Deed.CUT:
                asyncio.get_running_loop().call_later(self._rng.uniform(*_CUT_S), writer.transport.abort)
        return True


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """The next request as it came. Raises asyncio.IncompleteReadError at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return head + await reader.readexactly(int(value))
    return head


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
