"""Small strips of a lane on their way to staging memory, a buffer at a time, just before they would leave.

queued --buffer--> being copied --copied--> submitted from the buffer --acknowledged--> buffer released
   |
   +--no buffer, and none of ours will come back--> submitted straight from the blocks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from pdcluster_connector.device import Device
from pdcluster_connector.reshard import StripGatherer
from pdcluster_connector.worker.batches import Cursor, HeldBuffers

_COPIES_AHEAD: Final = 4
"""How many buffers are being filled at once: a device copies beside the lane, which looks once in a millisecond."""


@dataclass(slots=True)
class LaneStrips:
    """Strips of one lane. Not thread-safe: the lane thread owns it. ``gatherer``: None: parts come without gathers."""

    device: Device
    buffers: HeldBuffers
    gatherer: StripGatherer | None

    def is_ready(self, cursor: Cursor) -> bool:
        """Whether its ranges may be submitted. If not, its strips are being copied, or wait for a buffer of this lane.

        A lane never waits for the buffers of another lane, whose decode rank may be silent.
        """
        if cursor.gather is not None and not cursor.is_copying:
            self._begin_copy(cursor)
        if cursor.is_copying and self.device.is_done(cursor.copied):
            cursor.gather = None
        return cursor.gather is None

    def look_ahead(self, cursors: Iterable[Cursor]) -> None:
        """Begins the next copies too, in order. Parts behind one that waits for space get no buffer: their buffer would
        never come back."""
        for cursor in islice(cursors, _COPIES_AHEAD):
            if cursor.may_leave and not self.is_ready(cursor) and not cursor.is_copying:
                return

    def _begin_copy(self, cursor: Cursor) -> None:
        """Begins the copy. Without space, the strips wait for a buffer of this lane if it holds one, else leave as
        they are."""
        assert cursor.gather is not None, "nothing to gather"
        assert self.gatherer is not None, "strips to gather in a lane that cannot"
        strips = self.gatherer.begin(cursor.part.record.layer, cursor.gather)
        if strips is not None:
            cursor.stage(strips)
            self.buffers.add(cursor.part)
        elif not self.buffers.hold_strips:
            cursor.leave_as_strips()
