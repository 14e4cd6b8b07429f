"""The bytes of an answer that its client has not taken yet: how long they wait, and the room that they take.

    more than the socket holds --> begins --the client takes them--> ends
                                     +-- too long, or no room for them --> the connection is closed at once

A relayed answer has its own way: its owner stops reading from the engine. Pages and answers to questions are whole when
they are written, up to 16 MiB each, and a client with many connections that takes none of them would fill the memory.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from pdcluster_router.core.clients.room import Unread


class Taker(Protocol):
    """The connection."""

    transport: asyncio.Transport

    def abort(self) -> None:
        """Closes the connection at once."""
        ...


class Untaken:
    """Those of one connection. Event loop only."""

    __slots__ = ("_loop", "_room", "_taker", "_timeout_s", "_timer")

    def __init__(self, taker: Taker, room: Unread, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """``timeout_s``: the longest time in which a client may take nothing."""
        self._taker = taker
        self._room = room
        self._timeout_s = timeout_s
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the client has to take bytes in time."""
        return self._timer is not None

    def begins(self) -> None:
        """The socket takes no more; the client has ``timeout_s`` from now on."""
        self.ends()
        self._timer = self._loop.call_later(self._timeout_s, self._taker.abort)
        if not self._room.hold(self._taker.transport.get_write_buffer_size()):
            self._taker.abort()

    def ends(self) -> None:
        """The client has taken enough, or has gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._room.release()
