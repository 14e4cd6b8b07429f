"""Transports over a real one that break what the contract of ``Transport`` promises, or use all that it allows."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from patience import until
from pdcluster_connector.transport.base import Transport, WriteId, WriteRange, WriteStatus
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_connector.worker.prefill import PrefillWorker


class Wrapped:
    """Passes on what a subclass does not change."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    @property
    def session(self) -> str:
        return self._inner.session

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    @property
    def writes_per_submit(self) -> int:
        return self._inner.writes_per_submit

    def register(self, address: int, num_bytes: int) -> None:
        self._inner.register(address, num_bytes)

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        return self._inner.submit_writes(session, ranges)

    def write_status(self, write: WriteId) -> WriteStatus:
        return self._inner.write_status(write)

    def close(self) -> None:
        self._inner.close()


class Failing(Wrapped):
    """Every write that was made is called failed."""

    def write_status(self, write: WriteId) -> WriteStatus:
        status = super().write_status(write)
        return WriteStatus.FAILED if status is WriteStatus.DONE else status


class Unseen(Wrapped):
    """A fault that nobody foresaw: no look at a write succeeds."""

    def write_status(self, write: WriteId) -> WriteStatus:
        raise RuntimeError(f"write {write} cannot be looked at")


class FirstNeverEnds(Wrapped):
    """Its peer is silent: the first write stays under way."""

    _first: WriteId | None = None

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        write = super().submit_writes(session, ranges)
        self._first = self._first or write
        return write

    def write_status(self, write: WriteId) -> WriteStatus:
        return WriteStatus.PENDING if write == self._first else super().write_status(write)


class Forgetting(Wrapped):
    """Writes from ``[begin, end)`` are DONE without having been made."""

    def __init__(self, inner: Transport, begin: int, end: int) -> None:
        super().__init__(inner)
        self._begin, self._end = begin, end

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        kept = [it for it in ranges if not self._begin <= it[0] < self._end]
        return super().submit_writes(session, kept) if kept else WriteId(-1)

    def write_status(self, write: WriteId) -> WriteStatus:
        return WriteStatus.DONE if write == -1 else super().write_status(write)


class ForgettingOnce(Forgetting):
    """As ``Forgetting``, but for the first ``num_writes`` of them only."""

    def __init__(self, inner: Transport, begin: int, end: int, num_writes: int) -> None:
        super().__init__(inner, begin, end)
        self._left = num_writes

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        if self._left and any(self._begin <= source < self._end for source, _, _ in ranges):
            self._left -= 1
            return super().submit_writes(session, ranges)
        return self._inner.submit_writes(session, ranges)


class Shortening(Wrapped):
    """Only the first half of each write is made."""

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        return super().submit_writes(session, [(source, target, size // 2) for source, target, size in ranges])


class Permuting(Wrapped):
    """Writes pieces of ``piece_bytes`` into each other's place, and counts them as sent: a plan that is wrong.

    ``place_of``: where the piece of this number, counted from the memory's begin, is written instead.
    """

    def __init__(self, inner: Transport, begin: int, piece_bytes: int, place_of: Callable[[int], int]) -> None:
        super().__init__(inner)
        self._begin, self._piece_bytes, self._place_of = begin, piece_bytes, place_of
        self._parts: dict[WriteId, list[WriteId]] = {}

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        parts = [self._inner.submit_writes(session, [piece]) for it in ranges for piece in self._pieces(*it)]
        self._parts[parts[-1]] = parts
        return parts[-1]

    def _pieces(self, source: int, target: int, num_bytes: int) -> list[WriteRange]:
        size, first = self._piece_bytes, target - self._begin
        assert first % size == num_bytes % size == 0
        return [
            (source + done, self._begin + self._place_of((first + done) // size) * size, size)
            for done in range(0, num_bytes, size)
        ]

    def write_status(self, write: WriteId) -> WriteStatus:
        parts = self._parts[write]
        while parts:
            status = self._inner.write_status(parts[0])
            if status is not WriteStatus.DONE:
                return status
            parts.pop(0)
        return WriteStatus.DONE


@dataclass
class Wire:
    """What the test says to all late transports of a rank."""

    is_holding: bool = False
    num_submitted: int = 0


class Late(Wrapped):
    """Gives each write to the real one when the wire lets it, at the next look at its status."""

    def __init__(self, inner: Transport, wire: Wire) -> None:
        super().__init__(inner)
        self._wire = wire
        self._ids = itertools.count(1)
        self._waiting: dict[WriteId, tuple[str, Sequence[WriteRange]]] = {}
        self._submitted: dict[WriteId, WriteId] = {}

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        write = WriteId(next(self._ids))
        self._waiting[write] = (session, ranges)
        self._wire.num_submitted += 1
        return write

    def write_status(self, write: WriteId) -> WriteStatus:
        if write in self._waiting and self._wire.is_holding:
            return WriteStatus.PENDING
        if write in self._waiting:
            self._submitted[write] = self._inner.submit_writes(*self._waiting.pop(write))
        return self._inner.write_status(self._submitted[write])

    def close(self) -> None:
        self._waiting.clear()
        super().close()


class StopsItsProcess(Wrapped):
    """Stops the process as SIGSTOP does when its second write is under way and its first is done. ``has_stopped``: set
    then, shared by all that stop once between them."""

    _first: WriteId | None = None
    _status: WriteStatus = WriteStatus.PENDING
    """Of the first: once it is no longer pending, Mooncake must not be asked again."""

    def __init__(self, inner: Transport, has_stopped: threading.Event) -> None:
        super().__init__(inner)
        self._has_stopped = has_stopped

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        write = super().submit_writes(session, ranges)
        if self._first is None:
            self._first = write
        elif not self._has_stopped.is_set():
            self._has_stopped.set()
            assert until(self._is_first_done)
            os.kill(os.getpid(), signal.SIGSTOP)
        return write

    def write_status(self, write: WriteId) -> WriteStatus:
        if write != self._first:
            return super().write_status(write)
        if self._status is WriteStatus.PENDING:
            self._status = super().write_status(write)
        return self._status

    def _is_first_done(self) -> bool:
        assert self._first is not None
        return self.write_status(self._first) is WriteStatus.DONE


class _WrappedSessions(Sessions):
    def __init__(self, inner: Sessions, wrap: Callable[[Transport], Transport]) -> None:
        self._inner, self._wrap = inner, wrap

    def open(self) -> Transport:
        return self._wrap(self._inner.open())

    def close(self, deadline: float) -> bool:
        return self._inner.close(deadline)


def wrap_transports(worker: PrefillWorker, wrap: Callable[[Transport], Transport]) -> None:
    """The worker's lanes write by sessions that are wrapped as they are opened."""
    worker._context = replace(worker._context, sessions=_WrappedSessions(worker._context.sessions, wrap))
