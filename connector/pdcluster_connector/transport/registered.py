"""Which of our memory may be written from. TCP does not check the source, RDMA fails late: so we check."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Final

from pdcluster_protocol.errors import TransferError

_ABOVE_ALL: Final = 1 << 64


class RegisteredMemory:
    """Disjoint spans of addresses. Filled at engine start, only read while lanes run."""

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

    def _index(self, address: int) -> int:
        """The last span that begins at or before ``address``; -1 if there is none."""
        return bisect_right(self._spans, (address, _ABOVE_ALL)) - 1
