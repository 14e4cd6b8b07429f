"""A transport inside one process: a write is a memory copy, and tests decide when and whether it happens.

It passes the same contract tests as Mooncake's. Addresses are real ones of this process.
Half of the ranges of a submit that fails land all the same.

    network = FakeNetwork()
    prefill, decode = network.join(), network.join()
    network.hold()                      # all writes, or those to one session, stay PENDING ...
    network.release()                   # ... until now
    network.fail_next()                 # the next submit is FAILED, half of it landed
    network.cut(decode.session)         # that peer is gone: all writes to it fail
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdcluster_connector.transport.base import RegisteredMemory, WriteId, WriteRange, WriteStatus
from pdcluster_protocol.errors import ConfigError, TransferError


@dataclass(frozen=True, slots=True)
class _Copy:
    write: WriteId
    sender: str
    session: str
    ranges: tuple[WriteRange, ...]


class FakeNetwork:
    """Joins fake transports, and holds the script of what goes wrong. Any thread."""

    def __init__(self, writes_per_submit: int = 1) -> None:
        self.writes_per_submit = writes_per_submit
        self._network_lock = threading.Lock()
        self._memories: dict[str, RegisteredMemory] = {}
        self._statuses: dict[WriteId, WriteStatus] = {}
        self._held: list[_Copy] = []
        self._num_failures = 0
        self._is_holding = False
        self._paused: set[str] = set()
        self._names = itertools.count(1)
        self._write_ids = itertools.count(1)

    def join(self) -> FakeTransport:
        """One more peer, under an address that was never used before."""
        session = f"fake:{next(self._names)}"
        memory = self._memories[session] = RegisteredMemory()
        return FakeTransport(self, session, memory)

    def hold(self, session: str | None = None) -> None:
        """Submits from now on, to ``session`` or to any peer, stay PENDING."""
        with self._network_lock:
            self._is_holding = self._is_holding or session is None
            if session is not None:
                self._paused.add(session)

    def release(self, count: int | None = None) -> None:
        """The ``count`` oldest held submits end; without ``count`` all do, and no further one is held."""
        with self._network_lock:
            if count is None:
                self._is_holding, count = False, len(self._held)
                self._paused.clear()
            released, self._held = self._held[:count], self._held[count:]
            for copy in released:
                self._finish(copy)

    def fail_next(self) -> None:
        """One more submit, in the order of their ends, fails."""
        self._num_failures += 1

    def cut(self, session: str) -> None:
        """The peer is gone: held and future writes to it fail and never land, and so do those from it."""
        with self._network_lock:
            self._memories.pop(session, None)
            held, self._held = self._held, []
            for copy in held:
                if session in (copy.session, copy.sender):
                    self._statuses[copy.write] = WriteStatus.FAILED
                else:
                    self._held.append(copy)

    def submit(self, sender: str, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        """For ``FakeTransport``: copies are held or made."""
        with self._network_lock:
            copy = _Copy(WriteId(next(self._write_ids)), sender, session, tuple(ranges))
            self._statuses[copy.write] = WriteStatus.PENDING
            if self._is_holding or (session in self._paused and session in self._memories):
                self._held.append(copy)
            else:
                self._finish(copy)
            return copy.write

    def take_status(self, write: WriteId) -> WriteStatus:
        """For ``FakeTransport``: forgets a write that has ended, as Mooncake does."""
        with self._network_lock:
            status = self._statuses[write]
            if status is not WriteStatus.PENDING:
                del self._statuses[write]
            return status

    def _finish(self, copy: _Copy) -> None:
        if self._num_failures:
            self._num_failures -= 1
            self._land(replace(copy, ranges=copy.ranges[: len(copy.ranges) // 2]))
            self._statuses[copy.write] = WriteStatus.FAILED
        else:
            self._statuses[copy.write] = WriteStatus.DONE if self._land(copy) else WriteStatus.FAILED

    def _land(self, copy: _Copy) -> bool:
        """Whether all of it has landed. A range that cannot land holds back no other one, as with Mooncake."""
        memory, has_landed = self._memories.get(copy.session), True
        for source, target, num_bytes in copy.ranges:
            if memory is not None and memory.is_registered(target, num_bytes):
                ctypes.memmove(target, source, num_bytes)
            else:
                has_landed = False
        return has_landed


class FakeTransport:
    """One peer of a ``FakeNetwork``. Thread-safe."""

    def __init__(self, network: FakeNetwork, session: str, memory: RegisteredMemory) -> None:
        self._network = network
        self._session = session
        self._memory = memory
        self._is_closed = False

    @property
    def session(self) -> str:
        return self._session

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    @property
    def writes_per_submit(self) -> int:
        return self._network.writes_per_submit

    def register(self, address: int, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ConfigError(f"cannot register {num_bytes} bytes: a span has at least one")
        self._memory.add(address, num_bytes)

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        if self._is_closed:
            raise TransferError(f"transport {self._session} is closed")
        assert 1 <= len(ranges) <= self.writes_per_submit, f"{len(ranges)} ranges in one submit"
        self._memory.require_all(ranges)
        return self._network.submit(self._session, session, ranges)

    def write_status(self, write: WriteId) -> WriteStatus:
        return self._network.take_status(write)

    def close(self) -> None:
        self._is_closed = True
        self._network.cut(self._session)
