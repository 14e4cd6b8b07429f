"""One client: asks, reads byte by byte, leaves when its plan says so, and gives up when nothing ends.

Knows HTTP as far as it must see every broken end; judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from campaign.outcomes import Observed
from campaign.questions import Question
from fakes.http import Message, read_head, request_bytes

_LOOPBACK: Final = "127.0.0.1"
_PATH: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client goes away: after so many seconds or so many bytes of the answer's body."""

    after_s: float | None = None
    after_bytes: int | None = None
    is_reset: bool = False
    """By RST instead of FIN."""


@dataclass(frozen=True, slots=True)
class Order:
    """One request as its client plans it, ``gap_s`` after the one before. ``timeout_s``: its ``X-Request-Timeout``."""

    index: int
    question: Question
    is_stream: bool
    timeout_s: float | None = None
    leave: Leave | None = None
    gap_s: float = 0.0


async def ask(port: int, order: Order, request_id: str, *, give_up_s: float, host: str = _LOOPBACK) -> Observed:
    """What the client of ``order`` saw; back after ``give_up_s`` seconds at most."""
    observed = Observed()
    leaves_s = order.leave.after_s if order.leave else None
    try:
        async with asyncio.timeout(give_up_s if leaves_s is None else leaves_s):
            await _converse((host, port), order, request_id, observed)
    except TimeoutError:
        observed.is_hung, observed.has_left = leaves_s is None, leaves_s is not None
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        observed.cut = f"{type(error).__name__} {error}"
    return observed


def body_of(order: Order) -> bytes:
    """The request's body."""
    body = {
        "prompt": list(order.question.prompt),
        "max_tokens": order.question.max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "stream": order.is_stream,
    }
    return json.dumps(body).encode()


async def _converse(place: tuple[str, int], order: Order, request_id: str, observed: Observed) -> None:
    reader, writer = await asyncio.open_connection(*place)
    try:
        headers = {"x-request-id": request_id}
        if order.timeout_s is not None:
            headers["x-request-timeout"] = f"{order.timeout_s:.3f}"
        writer.write(request_bytes(_PATH, body_of(order), headers))
        await _read(reader, order.leave, observed)
    finally:
        _hang_up(writer, is_reset=order.leave is not None and order.leave.is_reset)


async def _read(reader: asyncio.StreamReader, leave: Leave | None, observed: Observed) -> None:
    head = await read_head(reader)
    observed.status = head.status
    async for piece in _pieces(reader, head):
        observed.body += piece
        if leave and leave.after_bytes is not None and len(observed.body) >= leave.after_bytes:
            observed.has_left = True
            return
    observed.is_whole = True


async def _pieces(reader: asyncio.StreamReader, head: Message) -> AsyncIterator[bytes]:
    """Raises asyncio.IncompleteReadError when the answer is cut."""
    if head.headers.get("transfer-encoding") != "chunked":
        left = int(head.headers["content-length"])
        while left:
            piece = await reader.read(min(left, 65536))
            if not piece:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(piece)
            yield piece
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


def _hang_up(writer: asyncio.StreamWriter, *, is_reset: bool) -> None:
    if is_reset:
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
