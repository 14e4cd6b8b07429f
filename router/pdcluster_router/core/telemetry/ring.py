"""The newest entries that fit into so many bytes: what a router remembers of requests, encoded.

Entries are bytes: their size is known, and Python's garbage collector does not look at them. A search goes through all
of them, 0.1 us for each, and is made only when a user asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

ENTRY_BYTES: Final = 72
"""The bytes that an entry takes besides its content: the head of its object (33), its place (8), and rounding up."""


class Ring:
    """One owner."""

    __slots__ = ("_entries", "_max_bytes", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._entries: deque[bytes] = deque()
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of all entries, and ``ENTRY_BYTES`` more for each; at most ``max_bytes``."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: bytes) -> None:
        """Add the newest entry. The oldest ones make room for it. An entry that is larger than the ring is not
        added."""
        num_bytes = len(entry) + ENTRY_BYTES
        if num_bytes > self._max_bytes:
            return
        self._entries.append(entry)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._entries.popleft()) + ENTRY_BYTES

    def newest(self) -> Iterator[bytes]:
        """All entries, the newest one first. Add none meanwhile."""
        return reversed(self._entries)

    def holding(self, part: bytes) -> Iterator[bytes]:
        """The entries that have ``part`` in them, the newest one first. Add none meanwhile."""
        return (entry for entry in reversed(self._entries) if part in entry)

    @property
    def oldest(self) -> bytes | None:
        return self._entries[0] if self._entries else None
