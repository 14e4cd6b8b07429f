"""Staging memory: where gathered or resharded KV waits for its writes. Registered with the transport at engine start.

The resharder's thread or the lanes take buffers, and any thread gives them back, part by part. If all memory is taken,
the resharder waits here; lanes and the forward pass never do. Spans are taken first fit and come back in any order.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class SpanPool:
    """``capacity`` bytes, handed out in disjoint spans that start at multiples of ``alignment``."""

    capacity: int
    alignment: int = 64
    _free: list[tuple[int, int]] = field(init=False)
    """Spans [start, stop), ascending; no two touch."""
    _taken: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity -= self.capacity % self.alignment
        self._free = [(0, self.capacity)] if self.capacity else []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is taken."""
        return not self._taken

    def take(self, num_bytes: int) -> int | None:
        """The start of a span of at least ``num_bytes`` (one or more); None when there is no space for it now."""
        needed = -(-num_bytes // self.alignment) * self.alignment
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= needed:
                self._free[index : index + 1] = [(start + needed, stop)] if stop - start > needed else []
                self._taken[start] = needed
                return start
        return None

    def give_back(self, start: int) -> None:
        """The span that was taken at ``start`` is free.

        Raises:
            KeyError: No span was taken there.
        """
        insort(self._free, (start, start + self._taken.pop(start)))
        merged = self._free[:1]
        for span in self._free[1:]:
            if span[0] == merged[-1][1]:
                merged[-1] = (merged[-1][0], span[1])
            else:
                merged.append(span)
        self._free = merged


_LOOK_EVERY_S = 0.05
"""Longest time until a wait for space sees that the resharder is closing."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A buffer: ``num_bytes`` from ``offset`` on, counted from the staging memory's first byte."""

    offset: int
    num_bytes: int


class StagingBuffer:
    """One part's place in staging memory. It is given back when each of its ``holders`` has released it."""

    def __init__(self, give_back: Callable[[], None], holders: int = 1) -> None:
        self._give_back = give_back
        self._holders = holders
        self._holders_lock = threading.Lock()

    def release(self) -> None:
        """One holder does not read the buffer any more. Called once for each holder, by any thread."""
        with self._holders_lock:
            self._holders -= 1
            is_free = self._holders == 0
            assert self._holders >= 0, "a buffer was released more often than it has holders"
        if is_free:
            self._give_back()


class StagingMemory:
    """``num_bytes`` on ``device``, at an address that is a multiple of ``alignment_bytes``."""

    def __init__(self, num_bytes: int, device: torch.device, alignment_bytes: int = 1) -> None:
        """Engine start.

        ``alignment_bytes``: ``Device.registration_alignment_bytes``; the size is rounded up to a multiple of it.
        """
        self.num_bytes = -(-num_bytes // alignment_bytes) * alignment_bytes
        whole = torch.empty(self.num_bytes + alignment_bytes, dtype=torch.uint8, device=device)
        skipped = -whole.data_ptr() % alignment_bytes
        self.tensor = whole[skipped : skipped + self.num_bytes]
        """uint8 [num_bytes]."""
        self._pool = SpanPool(self.num_bytes)
        self._shares: dict[Ticket, int] = {}
        self._changed = threading.Condition()
        self.is_wanted = False
        """Whether the resharder waits for space. Any thread may read it."""

    @property
    def address(self) -> int:
        """Address of the first byte. A buffer at ``offset`` is written from ``address + offset``."""
        return self.tensor.data_ptr()

    @property
    def span(self) -> tuple[int, int]:
        """Address and bytes, as a transport registers them."""
        return self.address, self.num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether every buffer has come back."""
        with self._changed:
            return self._pool.is_idle

    def take(self, num_bytes: int, shares: int, *, deadline: float, is_closing: Callable[[], bool]) -> Ticket | None:
        """A buffer that is free again after ``shares`` releases; None: none was free by ``deadline`` (monotonic
        seconds), or ``is_closing``. Waits. Resharder thread only.
        """
        with self._changed:
            while (offset := self._pool.take(num_bytes)) is None:
                left = deadline - time.monotonic()
                self.is_wanted = left > 0 and not is_closing()
                if not self.is_wanted:
                    return None
                self._changed.wait(min(left, _LOOK_EVERY_S))
            self.is_wanted = False
            return self._hand_out(offset, num_bytes, shares)

    def take_now(self, num_bytes: int) -> Ticket | None:
        """A buffer that is free again after one release; None: none is free now. Any thread; never waits."""
        with self._changed:
            offset = self._pool.take(num_bytes)
            return None if offset is None else self._hand_out(offset, num_bytes, 1)

    def release(self, ticket: Ticket, shares: int = 1) -> None:
        """Nothing reads the bytes of ``shares`` of the buffer's parts any more. Any thread; never waits for a peer.

        Raises:
            KeyError: All of the ticket's shares have come back already.
        """
        with self._changed:
            self._shares[ticket] -= shares
            if self._shares[ticket] <= 0:
                del self._shares[ticket]
                self._pool.give_back(ticket.offset)
                self._changed.notify()

    def _hand_out(self, offset: int, num_bytes: int, shares: int) -> Ticket:
        ticket = Ticket(offset, num_bytes)
        self._shares[ticket] = shares
        return ticket
