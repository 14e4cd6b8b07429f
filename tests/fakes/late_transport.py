"""A transport that reads and moves bytes as late as the test wants, as the contract of ``Transport`` allows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pdcluster_connector.transport.base import Transport, WriteId, WriteStatus


@dataclass
class Wire:
    """What the test says to all transports of a rank."""

    is_holding: bool = False
    num_submitted: int = 0


class LateTransport:
    """Over a real one, which gets each write when the wire lets it, at the next look at its status."""

    def __init__(self, inner: Transport, wire: Wire) -> None:
        self._inner = inner
        self._wire = wire
        self._ids = itertools.count(1)
        self._waiting: dict[WriteId, tuple[str, int, int, int]] = {}
        self._submitted: dict[WriteId, WriteId] = {}

    @property
    def session(self) -> str:
        return self._inner.session

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    def register(self, address: int, num_bytes: int) -> None:
        self._inner.register(address, num_bytes)

    def submit_write(self, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        write = WriteId(next(self._ids))
        self._waiting[write] = (session, source, target, num_bytes)
        self._wire.num_submitted += 1
        return write

    def write_status(self, write: WriteId) -> WriteStatus:
        if write in self._waiting and self._wire.is_holding:
            return WriteStatus.PENDING
        if write in self._waiting:
            self._submitted[write] = self._inner.submit_write(*self._waiting.pop(write))
        return self._inner.write_status(self._submitted[write])

    def close(self) -> None:
        self._waiting.clear()
        self._inner.close()
