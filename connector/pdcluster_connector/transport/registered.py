"""Which of our memory may be written from. TCP does not check the source, RDMA fails late: so we check."""

from __future__ import annotations

from bisect import bisect_right, insort

from pdcluster_protocol.errors import TransferError


class RegisteredMemory:
    """Disjoint spans of addresses. Filled at engine start, only read afterwards."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, address: int, num_bytes: int) -> None:
        """``[address, address + num_bytes)`` is registered."""
        insort(self._spans, (address, address + num_bytes))

    def require(self, address: int, num_bytes: int) -> None:
        """The whole range is registered.

        Raises:
            TransferError: It is not.
        """
        index = bisect_right(self._spans, (address, 1 << 64)) - 1
        if index < 0 or address + num_bytes > self._spans[index][1] or num_bytes < 1:
            raise TransferError(f"source range of {num_bytes} bytes is not registered memory")
