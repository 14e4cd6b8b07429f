"""The interface of a transport: one-sided writes into a peer's registered memory.

Submit and poll, never wait: Mooncake's blocking calls spin a core each (measured with 0.3.13).
Every transport passes ``tests/contract/test_transport.py``.

    submit_writes --> PENDING --> DONE      the peer has every byte
                         |
                         +------> FAILED    bytes may have landed, and may still land for a while
                         +------> LOST      the same, and the transport does not know for how long
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NewType, Protocol

from pdcluster_protocol.errors import TransferError

WriteId = NewType("WriteId", int)
"""Names the writes of one call of ``submit_writes``. A transport gives each id out once."""

WriteRange = tuple[int, int, int]
"""Source address, target address, and bytes (at least 1) of one write."""

_ABOVE_ALL: Final = 1 << 64


class WriteStatus(Enum):
    PENDING = auto()
    """May read our memory and write the peer's, now or later. With a stopped peer a write stays pending for minutes."""
    DONE = auto()
    """The peer's side has acknowledged every byte."""
    FAILED = auto()
    """Not acknowledged. Bytes may still land for a while."""
    LOST = auto()
    """Not acknowledged, and the transport cannot say how far the write is: only closing the transport ends it."""


def _enter_nothing() -> None:
    """The ``enter_thread`` of a transport without a device."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """How a transport is to move bytes. ``host``: where it listens, an address of this machine."""

    host: str
    protocol: str
    """``transfer_protocol`` of the connector's settings."""
    devices: tuple[str, ...] = ()
    """``transfer_devices`` of the connector's settings."""
    writes_per_submit: int = 0
    """``writes_per_submit`` of the connector's settings. 0: what fits the protocol."""
    enter_thread: Callable[[], None] = _enter_nothing
    """``Device.enter_thread`` of the rank. Each thread that the transport starts calls it before it calls Mooncake."""


class Transport(Protocol):
    """One engine rank's end of the network. Lane threads may call it at the same time."""

    @property
    def session(self) -> str:
        """The address (``host:port``) by which peers write to this rank. Each start gives another address."""

    @property
    def is_open(self) -> bool:
        """False once the transport is closed, by its user or by another user of a shared transport. Never waits."""

    @property
    def writes_per_submit(self) -> int:
        """How many ranges one call of ``submit_writes`` takes at most; the same as long as the transport lives."""

    def register(self, address: int, num_bytes: int) -> None:
        """Peers may write to, and we may write from, ``[address, address + num_bytes)``. Engine start; may wait.

        Raises:
            ConfigError: The memory cannot be registered.
        """

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        """All ``ranges``, 1 to ``writes_per_submit`` of them, are being written into the peer's memory.

        They share one status: DONE if all were acknowledged, FAILED only once each of them has ended. Lane thread.
        Never waits for a peer; the first write to a live peer may cost some milliseconds.

        Raises:
            TransferError: A source is not registered, or the transport is closed or refuses. For certain nothing was
                submitted.
        """

    def write_status(self, write: WriteId) -> WriteStatus:
        """How far a submit is. Ask until it is not PENDING, then never again. Lane thread; does not wait."""

    def close(self) -> None:
        """No peer can write any more, and we write no more. Waits 2 s at most. Does nothing if already closed.

        Raises:
            TransferError: Writes may go on: a thread is still inside the transport. Each further call raises it until
                that thread has come out.
        """


class RegisteredMemory:
    """The memory of this rank from which writes may read, as disjoint spans. Filled at engine start, then only read.

    TCP does not check the source of a write, and RDMA fails late: so every transport asks here first.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, address: int, num_bytes: int) -> None:
        """``[address, address + num_bytes)`` is registered."""
        insort(self._spans, (address, address + num_bytes))

    def is_registered(self, address: int, num_bytes: int) -> bool:
        """Whether ``[address, address + num_bytes)``, at least one byte, lies in one span."""
        index = self._index(address)
        return index >= 0 and num_bytes > 0 and address + num_bytes <= self._spans[index][1]

    def require(self, address: int, num_bytes: int) -> None:
        """The whole range is registered.

        Raises:
            TransferError: It is not.
        """
        if not self.is_registered(address, num_bytes):
            raise TransferError(f"source range of {num_bytes} bytes at {address:#x} is not registered memory")

    def require_all(self, ranges: Sequence[WriteRange]) -> None:
        """The sources of all ``ranges`` are registered.

        Raises:
            TransferError: A source is not.
        """
        for source, _, num_bytes in ranges:
            self.require(source, num_bytes)

    def _index(self, address: int) -> int:
        """Index of the last span that begins at or before ``address``; -1: there is none."""
        return bisect_right(self._spans, (address, _ABOVE_ALL)) - 1
