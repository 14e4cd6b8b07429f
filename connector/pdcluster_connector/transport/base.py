"""What the connector needs of a transport: one-sided writes into a peer's registered memory.

Submit and poll, never wait: Mooncake's blocking calls spin a core each (measured with 0.3.13).
Every transport passes ``tests/contract/test_transport.py``.

    submit_write --> PENDING --> DONE      the peer has every byte
                        |
                        +------> FAILED    bytes may have landed, and may still land for a while
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NewType, Protocol

WriteId = NewType("WriteId", int)
"""Names one submitted write within its transport. Never used again."""


class WriteStatus(Enum):
    PENDING = auto()
    """May read our memory and write the peer's, now or later. A stopped peer keeps a write here for minutes."""
    DONE = auto()
    """The peer's side has acknowledged every byte."""
    FAILED = auto()
    """Not acknowledged. Bytes may still land for a while."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """How a transport is to move bytes. ``host``: where it listens, an address of this machine."""

    host: str
    protocol: str
    """``transfer_protocol`` of the connector's settings."""
    devices: tuple[str, ...] = ()
    """``transfer_devices`` of the connector's settings."""


class Transport(Protocol):
    """One engine rank's end of the network. Lane threads may call it at the same time."""

    @property
    def session(self) -> str:
        """The address (``host:port``) by which peers write to this rank; another one after each start."""

    @property
    def is_open(self) -> bool:
        """False once it is closed: by its user, or by another one of a transport that several share. Never waits."""

    def register(self, address: int, num_bytes: int) -> None:
        """Peers may write to, and we may write from, ``[address, address + num_bytes)``. Engine start; may wait.

        Raises:
            ConfigError: The memory cannot be registered.
        """

    def submit_write(self, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        """A write of ``num_bytes`` (at least 1) from our ``source`` to the peer's ``target`` is under way.

        Lane thread. Never waits for a peer; the first write to a live one may cost some milliseconds.

        Raises:
            TransferError: Surely not submitted: the source is not registered, or the transport is closed or refused.
        """

    def write_status(self, write: WriteId) -> WriteStatus:
        """How far a write is. Ask until it is not PENDING, then never again. Lane thread; does not wait."""

    def close(self) -> None:
        """No peer can write any more, and we write no more. Waits 2 s at most. A second call does nothing."""
