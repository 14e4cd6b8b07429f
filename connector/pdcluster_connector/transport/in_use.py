"""Frees a Mooncake engine once it is closed and every thread that is inside it has left.

A thread that opens a stopped peer may stay inside for a minute. Other threads do not wait for that thread, and do not
free the engine while it is inside. Source of truth: Mooncake 0.3.13, where a call of a freed engine ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

E = TypeVar("E")


class InUse(Generic[E]):
    """One engine, and how many threads are inside it. Any thread may call this. Only ``close`` waits."""

    def __init__(self, engine: E, free: Callable[[E], None]) -> None:
        """``free`` is called once, by the thread that closes or by the last thread that leaves."""
        self._engine: E | None = engine
        self._closed: E | None = None
        self._free = free
        self._num_inside = 0
        self._is_awaited = False
        """Whether the engine is left for ``close`` to free, so that ``close`` knows when it is freed."""
        self._is_freed = False
        self._has_left = threading.Condition()

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    @property
    def is_freed(self) -> bool:
        """Whether the engine has been freed."""
        return self._is_freed

    @contextmanager
    def enter(self) -> Iterator[E | None]:
        """Gives the engine, which stays while the caller is inside; None: the engine is closed."""
        with self._has_left:
            engine = self._engine
            self._num_inside += engine is not None
        try:
            yield engine
        finally:
            if engine is not None:
                self._leave()

    def shut(self) -> None:
        """Lets no further thread in. The caller calls ``close`` next."""
        with self._has_left:
            if self._engine is not None:
                self._engine, self._closed = None, self._engine
            self._is_awaited = True

    def close(self, timeout_s: float) -> bool:
        """Lets no further thread in. Waits up to ``timeout_s`` for those inside. Returns ``is_freed``."""
        self.shut()
        with self._has_left:
            self._has_left.wait_for(lambda: self._num_inside == 0, timeout_s)
            self._is_awaited = False
        self._free_if_left()
        return self._is_freed

    def _leave(self) -> None:
        with self._has_left:
            self._num_inside -= 1
            self._has_left.notify_all()
        self._free_if_left()

    def _free_if_left(self) -> None:
        with self._has_left:
            if self._num_inside or self._is_awaited:
                return
            engine, self._closed = self._closed, None
        if engine is not None:
            self._free(engine)
            self._is_freed = True
