"""The writes of a lane: parts of pushes, how far each part is, and the buffers of parts in staging memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pdcluster_connector.core.gathering import StripRun
from pdcluster_connector.core.ranges import ByteRanges
from pdcluster_connector.core.sending import Push
from pdcluster_connector.device import DeviceEvent
from pdcluster_connector.reshard import GatheredStrips, StagingBuffer
from pdcluster_connector.settings import MAX_BYTES_IN_SUBMIT
from pdcluster_connector.transport.base import WriteRange
from pdcluster_protocol.trace import LayerTrace


@dataclass(slots=True)
class LayerRecord:
    """When one layer of one push became final, began to leave and was acknowledged, in monotonic seconds."""

    step: int
    layer: int
    saved_at: float
    num_bytes: int
    write_begin: float = 0.0
    acked_at: float = 0.0
    unacked_bytes: int = 0

    def as_trace(self) -> LayerTrace:
        return LayerTrace(self.step, self.layer, self.saved_at, self.write_begin, self.acked_at, self.num_bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """One push's ranges in one region, and the base addresses to add to them."""

    push: Push
    ranges: ByteRanges
    source_base: int
    target_base: int
    record: LayerRecord
    buffer: StagingBuffer | None = None
    """The buffer of a part in staging memory; it is released once, when nothing reads it any more."""
    gathers: tuple[StripRun, ...] = ()
    """How the strips of ``ranges`` are to be gathered, buffer by buffer; empty: ``ranges`` leave as they are."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Parts that leave once ``event`` is complete: a region of a step for all pushes of the lane, or a second push."""

    event: DeviceEvent
    parts: tuple[Part, ...]


@dataclass(slots=True, eq=False)
class Cursor:
    """How far one part is submitted. ``unended``: the number of submits that may still read the part.

    ``gather``: the strips to copy to staging memory first, without ``rows`` until the copy begins; None: there are
    none, or their copy is complete.
    """

    part: Part
    rows: list[WriteRange]
    gather: StripRun | None = None
    copied: DeviceEvent = None
    """The event of the copy, once it has begun."""
    next_row: int = 0
    unended: int = 0
    is_dropped: bool = False

    @property
    def may_leave(self) -> bool:
        """Whether another range of the part may be submitted."""
        return self._has_rows and self.part.push.may_write

    @property
    def is_over(self) -> bool:
        """Whether nothing reads the part now or later."""
        return not self.unended and (self.is_dropped or not self._has_rows)

    @property
    def reads_blocks(self) -> bool:
        """Whether the part's writes, or its copy, read the request's own blocks."""
        return self.part.buffer is None or self.gather is not None

    @property
    def is_copying(self) -> bool:
        """Whether the part's buffer was still being filled at the last look."""
        return self.gather is not None and self.part.buffer is not None

    @property
    def _has_rows(self) -> bool:
        return self.gather is not None or self.next_row < len(self.rows)

    def stage(self, strips: GatheredStrips) -> None:
        """The part's strips are being copied to the buffer of ``strips``."""
        assert self.gather is not None, "nothing to gather"
        self.part = replace(self.part, ranges=self.gather.writes, source_base=strips.address, buffer=strips.buffer)
        self.rows, self.copied = _absolute_rows(self.part), strips.copied

    def leave_as_strips(self) -> None:
        """The part's strips leave straight from the blocks."""
        assert self.gather is not None, "nothing to gather"
        self.part = replace(self.part, ranges=self.gather.strips)
        self.rows, self.gather = _absolute_rows(self.part), None

    def take(self, count: int, num_bytes: int) -> tuple[list[WriteRange], int]:
        """The next ranges, ``count`` at most, and their bytes: no range follows once they are ``num_bytes`` (at least
        1). One more submit may read the part from now on."""
        first, total = self.next_row, 0
        last = min(first + count, len(self.rows))
        while self.next_row < last and total < num_bytes:
            total += self.rows[self.next_row][2]
            self.next_row += 1
        self.unended += 1
        return self.rows[first : self.next_row], total


@dataclass(slots=True)
class HeldBuffers:
    """Staging buffers that a lane holds; each is released once, whatever becomes of its part."""

    _held: dict[StagingBuffer, Part] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """The buffer of ``part``, if it has one, is held."""
        if part.buffer is not None:
            self._held[part.buffer] = part

    def release_if_over(self, cursor: Cursor) -> None:
        """Releases the buffer of the part, if it has one, once nothing reads the part any more."""
        buffer = cursor.part.buffer
        if buffer is not None and cursor.is_over and self._held.pop(buffer, None) is not None:
            buffer.release()

    def release_all(self) -> None:
        """Releases every buffer: the caller knows that nothing reads any of them."""
        while self._held:
            self._held.popitem()[0].release()

    def held_since(self, since: float) -> list[Push]:
        """The pushes that hold a buffer which the resharder filled at ``since`` or earlier."""
        resharded = (part for part in self._held.values() if not part.gathers)
        return list(dict.fromkeys(part.push for part in resharded if part.record.saved_at <= since))

    @property
    def hold_strips(self) -> bool:
        """Whether a buffer with gathered strips is held."""
        return any(part.gathers for part in self._held.values())


def cursors_of(part: Part) -> list[Cursor]:
    """One cursor for the part, or one for each buffer in which its strips are to be gathered."""
    if not part.gathers:
        return [Cursor(part, _absolute_rows(part))]
    return [Cursor(part, [], gather) for gather in part.gathers]


def _absolute_rows(part: Part) -> list[WriteRange]:
    """(source, target, bytes) of each range, as addresses. A range of more than ``MAX_BYTES_IN_SUBMIT`` is cut up."""
    sources = (part.ranges.source + part.source_base).tolist()
    targets = (part.ranges.target + part.target_base).tolist()
    rows = list(zip(sources, targets, part.ranges.num_bytes.tolist(), strict=True))
    if part.ranges.num_bytes.max(initial=0) <= MAX_BYTES_IN_SUBMIT:
        return rows
    return [piece for row in rows for piece in _pieces(*row)]


def _pieces(source: int, target: int, num_bytes: int) -> Iterator[WriteRange]:
    for first in range(0, num_bytes, MAX_BYTES_IN_SUBMIT):
        yield source + first, target + first, min(MAX_BYTES_IN_SUBMIT, num_bytes - first)
