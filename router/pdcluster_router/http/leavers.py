"""Clients that leave while they are not read.

A connection's end is found by reading from it. A paused connection is not read, so that the bytes which its client
sends ahead have a bound. The event loop, uvloop, cannot be asked for an end alone. So paused connections are in a set
of the kernel's (epoll) that is asked for nothing else, and the loop watches the set. The kernel tells of an end
although bytes before it are unread. If there are more of them than it keeps, the end cannot come, and is not seen.
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
    """The paused connections of one event loop. Event loop only; a watch is two calls of the kernel."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: dict[int, OnLeft] = {}
        self._set = select.epoll()
        loop.add_reader(self._set.fileno(), self._look)

    @property
    def num_watched(self) -> int:
        return len(self._told)

    def watch(self, descriptor: int, told: OnLeft) -> None:
        """``told`` is called once if the client leaves before ``forget``. Also if it has left already."""
        if self._set.closed:
            return  # The process ends, and so does the connection.
        self._set.register(descriptor, select.EPOLLRDHUP)
        self._told[descriptor] = told

    def forget(self, descriptor: int) -> None:
        """The connection is read again, or lost. Before its descriptor is closed: another may get the number."""
        if self._told.pop(descriptor, None) is not None:
            self._set.unregister(descriptor)

    def close(self) -> None:
        """Nothing is watched any more."""
        self._loop.remove_reader(self._set.fileno())
        self._told.clear()
        self._set.close()

    def _look(self) -> None:
        for descriptor, events in self._set.poll(0):
            if (told := self._told.get(descriptor)) is not None:  # None: a call before has forgotten it.
                self.forget(descriptor)
                told(is_broken=bool(events & _BROKEN))
