"""HTTP/1.1 by hand, for fakes and tests that must see every byte and every broken end."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Message:
    """A request or a response, head and whole body. ``is_whole``: it ended as its head said it would."""

    first_line: str
    headers: dict[str, str]
    body: bytes = b""
    is_whole: bool = True
    chunks: list[bytes] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.first_line.split(" ")[1])

    @property
    def path(self) -> str:
        return self.first_line.split(" ")[1]

    def json(self) -> Any:
        return json.loads(self.body)


async def read_head(reader: asyncio.StreamReader) -> Message:
    """A header that is there twice has both values. Raises asyncio.IncompleteReadError at the end of the stream."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        key = name.lower()
        headers[key] = f"{headers[key]}, {value.strip()}" if key in headers else value.strip()
    return Message(first, headers)


async def read_body(reader: asyncio.StreamReader, message: Message) -> Message:
    """The message with its body; cut short when the connection was."""
    try:
        async for part in _parts(reader, message):
            message.chunks.append(part)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        partial = getattr(error, "partial", b"")
        message.chunks.append(partial)
        message.is_whole = False
    message.body = b"".join(message.chunks)
    return message


async def _parts(reader: asyncio.StreamReader, message: Message) -> AsyncIterator[bytes]:
    if message.headers.get("transfer-encoding") != "chunked":
        yield await reader.readexactly(int(message.headers.get("content-length", 0)))
        return
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        part = (await reader.readexactly(size + 2))[:-2]
        if not size:
            return
        yield part


def request_bytes(path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> bytes:
    lines = {"host": "test", "content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


class RawClient:
    """One client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str) -> RawClient:
        """To a router with TLS, whoever it is: tests of trust have a client of their own."""
        scheme, _, address = url.partition("://")
        host, _, port = address.partition(":")
        context = ssl._create_unverified_context() if scheme == "https" else None
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 26, ssl=context))

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def receive(self) -> Message:
        return await read_body(self.reader, await read_head(self.reader))

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Message:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.send(request_bytes(path, raw, headers))
        return await self.receive()

    async def get(self, path: str, method: str = "GET") -> Message:
        await self.send(request_bytes(path, b"", method=method))
        return await self.receive()

    def leave(self) -> None:
        """Hang up at once."""
        self.writer.transport.abort()
