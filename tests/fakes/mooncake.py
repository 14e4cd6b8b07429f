"""A stand-in for Mooncake's engine that ends the test where the real one would end the process, or write on.

Strict: a batch has the writes that it was made for, none is asked about after it was freed or has ended an engine, none
is freed while a write of it goes on, memory is registered at whole ``alignment_bytes``, and more writes than Mooncake's
queue takes leave the peer in doubt.

    engine = StrictEngine(queue_writes=2048)
    engine.transfer_submit_write("peer", source, target, 16)    # as the binding's object
    engine.batches.status(batch, 3)                             # as ``LibraryBatches``
    engine.end(batch, 3, has_failed=False)                      # what the test decides
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from pdcluster_connector.transport.base import WriteStatus


@dataclass(slots=True)
class _Batch:
    states: list[WriteStatus]


@dataclass
class StrictEngine:
    """One engine. ``queue_writes``: what may be under way at once, to all peers."""

    queue_writes: int = 2048
    alignment_bytes: int = 1
    is_freed: bool = False
    calls: list[int] = field(default_factory=list)
    """How many writes each call had."""
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _registered: list[range] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def batches(self) -> StrictBatches:
        return StrictBatches(self)

    @property
    def num_batches(self) -> int:
        """How many are not freed."""
        return len(self._batches)

    def register_memory(self, address: int, num_bytes: int) -> int:
        assert address % self.alignment_bytes == num_bytes % self.alignment_bytes == 0, "not aligned"
        self._registered.append(range(address, address + num_bytes))
        return 0

    def transfer_submit_write(self, session: str, source: int, target: int, num_bytes: int) -> int:
        return self.batch_transfer_async_write(session, [source], [target], [num_bytes])

    def batch_transfer_async_write(self, session: str, sources: list[int], targets: list[int], sizes: list[int]) -> int:
        """0 when the queue is full: the writes that it still took go on."""
        assert not self.is_freed, "the engine is freed"
        assert len(sources) == len(targets) == len(sizes) >= 1
        for source, size in zip(sources, sizes, strict=True):
            last = source + size - 1
            assert any(source in span and last in span for span in self._registered), "RDMA would fail late"
        self.calls.append(len(sources))
        room = self.queue_writes - sum(
            state is WriteStatus.PENDING for batch in self._batches.values() for state in batch.states
        )
        number = next(self._ids)
        self._batches[number] = _Batch([WriteStatus.PENDING] * min(len(sources), room))
        return number if len(sources) <= room else 0

    def transfer_check_status(self, number: int) -> int:
        (state,) = self._batch(number).states
        if state is WriteStatus.PENDING:
            return 0
        del self._batches[number]
        return 1 if state is WriteStatus.DONE else -1

    def end(self, number: int, at: int, *, has_failed: bool = False) -> None:
        """One write of the batch is over."""
        self._batch(number).states[at] = WriteStatus.FAILED if has_failed else WriteStatus.DONE

    def lose(self, number: int, at: int) -> None:
        """What becomes of one write of the batch is not known, and never will be."""
        self._batch(number).states[at] = WriteStatus.LOST

    def _batch(self, number: int) -> _Batch:
        assert not self.is_freed, "the engine is freed"
        assert number in self._batches, "the batch is freed"
        return self._batches[number]


@dataclass(frozen=True, slots=True)
class StrictBatches:
    """What ``LibraryBatches`` asks the C++ for."""

    engine: StrictEngine

    def status(self, batch: int, number: int) -> WriteStatus:
        return self.engine._batch(batch).states[number]

    def free(self, batch: int) -> None:
        assert WriteStatus.PENDING not in self.engine._batch(batch).states, "freed while a write of it goes on"
        del self.engine._batches[batch]
