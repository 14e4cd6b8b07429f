"""One transport for all peers of a rank, where transports cost much: each transport registers all KV anew.

With Ascend this is needed: a process may register 256 regions (vllm-ascend 0.23, ``distributed/kv_transfer/utils``),
and two transports of a model with 80 layers need more. With other protocols it is a choice (``sessions``).

Each peer has a handle, which can be given back without the others. But only closing the transport itself surely ends
the writes through a handle, ours or a peer's. This is the *hard fence*, and it costs every handle. Each owner then
opens another handle, and the first that does so makes the next transport. There is never more than one transport.

    a lane's handle     closing it waits for its writes; the hard fence ends those that are still pending then
    a peer's way in     closing it is the hard fence: a peer's writes may be on their way
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final

from pdcluster_connector.ending import EndingThread
from pdcluster_connector.transport.base import Transport, WriteId, WriteRange, WriteStatus
from pdcluster_connector.transport.sessions import Sessions, close_or_end_engine
from pdcluster_protocol.errors import TransferError

LINGER_S: Final = 1.0
"""How long closing a lane's handle waits for writes whose end is not known. With the hard fence it takes under 2 s."""

_LOOK_EVERY_S: Final = 0.01


class Use(Enum):
    """The use that a rank makes of its handle."""

    LETS_IN = auto()
    """Decode: a peer writes into our memory."""
    WRITES = auto()
    """Prefill: we write. A write that has FAILED may still read our memory."""
    WRITES_AND_KNOWS_THE_END = auto()
    """Prefill with RDMA: a write that has FAILED does not read our memory any more, since Mooncake reports it only at
    the device's completion (``rdma_transport/worker_pool.cpp``)."""


class _OpenTransport:
    """A transport that several users may close. Any thread may call it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.is_open = True
        self._closing_lock = threading.Lock()

    def leave(self) -> None:
        """The transport is about to be closed: no further handle of it is given out. Never waits."""
        self.is_open = False

    def close(self) -> None:
        """Closes the transport. Waits for it, and before that for any other thread that is closing it."""
        self.leave()
        with self._closing_lock:
            self.transport.close()


class SharedTransport:
    """One user's handle of the transport. Its methods are as in ``Transport``; the memory is registered already."""

    def __init__(self, engine: _OpenTransport, use: Use) -> None:
        self._engine = engine
        self._use = use
        self._is_shut = self._is_closed = self._is_in_doubt = False
        """Shut: takes no write any more. Closed: no write is under way any more, either."""
        self._pending: set[WriteId] = set()
        self._ended: dict[WriteId, WriteStatus] = {}
        """The final states of writes that ended while the handle was being closed."""

    @property
    def session(self) -> str:
        return self._engine.transport.session

    @property
    def is_open(self) -> bool:
        return self._engine.is_open and not self._is_shut

    @property
    def writes_per_submit(self) -> int:
        return self._engine.transport.writes_per_submit

    def register(self, address: int, num_bytes: int) -> None:
        self._engine.transport.register(address, num_bytes)

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        if not self.is_open:
            raise TransferError(f"the transport session {self.session} is closed")
        write = self._engine.transport.submit_writes(session, ranges)
        self._pending.add(write)
        return write

    def write_status(self, write: WriteId) -> WriteStatus:
        if (found := self._ended.pop(write, None)) is not None:
            return found
        status = self._engine.transport.write_status(write)
        if status is not WriteStatus.PENDING:
            self._pending.discard(write)
            self._is_in_doubt = self._is_in_doubt or self._leaves_doubt(status)
        return status

    def _leaves_doubt(self, status: WriteStatus) -> bool:
        """Whether a submit that ended with ``status`` may still read our memory."""
        return status is WriteStatus.LOST or (status is WriteStatus.FAILED and self._use is Use.WRITES)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_shut = True
        if self._use is Use.LETS_IN or not self._has_ended():
            self._engine.close()
        self._is_closed = True

    def _has_ended(self) -> bool:
        """Waits up to ``LINGER_S`` for our writes. Returns whether none of them reads our memory any more."""
        until = time.monotonic() + LINGER_S
        while self._look() and self._engine.is_open and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        return not self._pending and not self._is_in_doubt

    def _look(self) -> bool:
        """Looks at every pending write. Returns whether any is still pending."""
        for write in list(self._pending):
            if (status := self.write_status(write)) is not WriteStatus.PENDING:
                self._ended[write] = status
        return bool(self._pending)


class SharedSessions(Sessions):
    """As ``Sessions``, with one transport for all."""

    is_shared = True

    def __init__(self, make: Callable[[], Transport], use: Use) -> None:
        """``make``: a transport with the rank's memory registered.

        Raises:
            ConfigError: ``make`` raised it.
        """
        self._make = make
        self._use = use
        self._opening_lock = threading.Lock()
        self._is_closed = False
        self._engine = _OpenTransport(make())

    def open(self) -> Transport:
        """As ``Sessions.open``.

        Raises:
            ConfigError: The transport was closed and no other one can be made, or ``close`` was called.
        """
        with self._opening_lock:
            self._require_open()
            if not self._engine.is_open:
                self._engine.close()  # waits for a thread that closes it: some devices cannot take two transports
                self._require_open()
                self._engine = _OpenTransport(self._make())
                self._require_open()  # if not, ``close`` waits for the lock, and closes this one too
            return SharedTransport(self._engine, self._use)

    def leave(self, session: str) -> None:
        engine = self._engine
        if engine.transport.session == session:
            engine.leave()

    def close(self, deadline: float) -> bool:
        """Ends all writes through all handles, in and out. Returns whether none can land or read any more.

        Waits until ``deadline`` (monotonic seconds) for that: another thread may be closing the transport, or making
        the next one.
        """
        self._is_closed = True
        self._engine.leave()
        return EndingThread(self._end).wait(deadline)

    def _end(self) -> bool:
        with self._opening_lock:
            return close_or_end_engine(self._engine)
