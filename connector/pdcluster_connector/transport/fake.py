"""A transport inside one process: a write is a memory copy, and tests decide when and whether it happens.

An ordinary backend that passes the same contract tests as Mooncake's. Addresses are real ones of this process.

    network = FakeNetwork()
    prefill, decode = network.join(), network.join()
    network.hold()                      # all writes, or those to one session, stay PENDING ...
    network.release()                   # ... until now
    network.fail_next(lands_late=True)  # the next write is FAILED, and lands at land_late()
    network.cut(decode.session)         # that peer is gone: all writes to it fail
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from dataclasses import dataclass

from pdcluster_connector.transport.base import RegisteredMemory, WriteId, WriteStatus
from pdcluster_protocol.errors import ConfigError, TransferError


@dataclass(frozen=True, slots=True)
class _Copy:
    write: WriteId
    sender: str
    session: str
    source: int
    target: int
    num_bytes: int


class FakeNetwork:
    """What joins fake transports, and the script of what goes wrong. Any thread."""

    def __init__(self) -> None:
        self._network_lock = threading.Lock()
        self._memories: dict[str, RegisteredMemory] = {}
        self._statuses: dict[WriteId, WriteStatus] = {}
        self._held: list[_Copy] = []
        self._late: list[_Copy] = []
        self._failures: deque[bool] = deque()
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
        """Writes from now on, to ``session`` or to any peer, stay PENDING."""
        with self._network_lock:
            self._is_holding = self._is_holding or session is None
            if session is not None:
                self._paused.add(session)

    def release(self, count: int | None = None) -> None:
        """The ``count`` oldest held writes end; without ``count`` all do, and no further write is held."""
        with self._network_lock:
            if count is None:
                self._is_holding, count = False, len(self._held)
                self._paused.clear()
            released, self._held = self._held[:count], self._held[count:]
            for copy in released:
                self._finish(copy)

    def fail_next(self, *, lands_late: bool = False) -> None:
        """One more write, in the order of their ends, fails; it lands at ``land_late`` or never."""
        self._failures.append(lands_late)

    def land_late(self) -> None:
        """Failed writes that were to land do so now."""
        with self._network_lock:
            late, self._late = self._late, []
            for copy in late:
                self._land(copy)

    def cut(self, session: str) -> None:
        """The peer is gone: held, late and future writes to it fail and never land, and so do those from it."""
        with self._network_lock:
            self._memories.pop(session, None)
            self._late = [copy for copy in self._late if session not in (copy.session, copy.sender)]
            held, self._held = self._held, []
            for copy in held:
                if session in (copy.session, copy.sender):
                    self._statuses[copy.write] = WriteStatus.FAILED
                else:
                    self._held.append(copy)

    def submit(self, sender: str, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        """For ``FakeTransport``: a copy is held or made."""
        with self._network_lock:
            copy = _Copy(WriteId(next(self._write_ids)), sender, session, source, target, num_bytes)
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
        if self._failures:
            if self._failures.popleft():
                self._late.append(copy)
            self._statuses[copy.write] = WriteStatus.FAILED
        else:
            self._statuses[copy.write] = WriteStatus.DONE if self._land(copy) else WriteStatus.FAILED

    def _land(self, copy: _Copy) -> bool:
        memory = self._memories.get(copy.session)
        if memory is None or not memory.is_registered(copy.target, copy.num_bytes):
            return False
        ctypes.memmove(copy.target, copy.source, copy.num_bytes)
        return True


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

    def register(self, address: int, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ConfigError(f"cannot register {num_bytes} bytes: a span has at least one")
        self._memory.add(address, num_bytes)

    def submit_write(self, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        if self._is_closed:
            raise TransferError(f"transport {self._session} is closed")
        self._memory.require(source, num_bytes)
        return self._network.submit(self._session, session, source, target, num_bytes)

    def write_status(self, write: WriteId) -> WriteStatus:
        return self._network.take_status(write)

    def close(self) -> None:
        self._is_closed = True
        self._network.cut(self._session)
