"""Notices clients that leave while their connections are not read.

The event loop, uvloop, finds the end of a connection only by reading. A paused connection is not read, which bounds the
bytes that its client sends ahead. So all paused connections are in one epoll set, which reports only ends, and the loop
watches this set. The kernel reports an end although bytes before it are unread. If a client has sent more bytes than
the kernel keeps, the end does not arrive, and is not noticed.
"""

from __future__ import annotations

import asyncio
import select
from typing import Final, Protocol


class OnLeft(Protocol):
    """Called when the client has left."""

    def __call__(self, *, is_broken: bool) -> None:
        """``is_broken``: the client left by a reset. If not, it may still take what is written."""
        ...


_BROKEN: Final = select.EPOLLERR | select.EPOLLHUP


class Leavers:
    """The paused connections of one event loop. Event loop only; a watch costs two system calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: dict[int, OnLeft] = {}
        self._set = select.epoll()
        loop.add_reader(self._set.fileno(), self._look)

    def watch(self, descriptor: int, told: OnLeft) -> None:
        """``told`` is called once if the client leaves before ``forget``. Also if it has left already."""
        if self._set.closed:
            return  # The process ends, and so does the connection.
        self._set.register(descriptor, select.EPOLLRDHUP)
        self._told[descriptor] = told

    def forget(self, descriptor: int) -> None:
        """The connection is read again, or lost. Call this before its descriptor, which may be reused, is closed."""
        if self._told.pop(descriptor, None) is not None:
            self._set.unregister(descriptor)

    def close(self) -> None:
        """Nothing is watched any more."""
        self._loop.remove_reader(self._set.fileno())
        self._told.clear()
        self._set.close()

    def _look(self) -> None:
        for descriptor, events in self._set.poll(0):
            if (told := self._told.get(descriptor)) is not None:  # None: an earlier ``told`` has forgotten it.
                self.forget(descriptor)
                told(is_broken=bool(events & _BROKEN))
