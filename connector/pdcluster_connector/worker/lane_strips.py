"""Copies small strips of a lane to staging memory, a buffer at a time, just before they leave.

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
"""How many buffers are filled at once. The device copies beside the lane, which looks once in a millisecond."""


@dataclass(slots=True)
class LaneStrips:
    """Strips of one lane. Not thread-safe: the lane thread owns it. ``gatherer``: None: parts come without gathers."""

    device: Device
    buffers: HeldBuffers
    gatherer: StripGatherer | None

    def is_ready(self, cursor: Cursor) -> bool:
        """Whether the cursor's ranges may be submitted. If not, its strips are being copied, or wait for a buffer that
        this lane holds.

        A lane never waits for the buffers of another lane, whose decode rank may be silent.
        """
        if cursor.gather is not None and not cursor.is_copying:
            self._begin_copy(cursor)
        if cursor.is_copying and self.device.is_done(cursor.copied):
            cursor.gather = None
        return cursor.gather is None

    def look_ahead(self, cursors: Iterable[Cursor]) -> None:
        """Begins the next copies too, in order. If a part waits for space, the parts behind it get no buffer: these
        parts would hold the space, and cannot leave before the part that waits."""
        for cursor in islice(cursors, _COPIES_AHEAD):
            if cursor.may_leave and not self.is_ready(cursor) and not cursor.is_copying:
                return

    def _begin_copy(self, cursor: Cursor) -> None:
        """Begins the copy if there is space. Otherwise the strips wait if this lane holds a buffer with strips, and
        leave as they are if it holds none."""
        assert cursor.gather is not None, "nothing to gather"
        assert self.gatherer is not None, "strips to gather in a lane that cannot"
        strips = self.gatherer.begin(cursor.part.record.layer, cursor.gather)
        if strips is not None:
            cursor.stage(strips)
            self.buffers.add(cursor.part)
        elif not self.buffers.hold_strips:
            cursor.leave_as_strips()
