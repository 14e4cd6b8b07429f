"""The replies that wait until a gateway takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from pdcluster_router.core.requests.consultation import BodyReply, GatewayReply, Replies

FULL_BYTES: Final = 64 << 10
"""With more bytes on their way to a gateway, no more of an answer is read."""


class ReplyQueue:
    """The replies of one stream. Event loop only; one task takes them."""

    def __init__(self) -> None:
        self._replies: deque[GatewayReply] = deque()
        self._num_bytes = 0
        self._news = asyncio.Event()
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        return self._num_bytes > FULL_BYTES

    def add(self, replies: Replies) -> None:
        self._replies.extend(replies)
        self._num_bytes += sum(map(_num_bytes_of, replies))
        self._news.set()

    def close(self) -> None:
        """No reply follows those that wait."""
        self._is_closed = True
        self._news.set()

    async def take(self) -> GatewayReply | None:
        """The next reply; None: there is none any more. May wait, for as long as the queue is open."""
        while not self._replies:
            if self._is_closed:
                return None
            self._news.clear()
            await self._news.wait()
        reply = self._replies.popleft()
        self._num_bytes -= _num_bytes_of(reply)
        return reply


def _num_bytes_of(reply: GatewayReply) -> int:
    """Bytes of a body in this reply; 0: it has none."""
    return len(reply.body) if isinstance(reply, BodyReply) and reply.body is not None else 0
