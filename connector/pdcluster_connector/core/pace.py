"""Decides how soon a lane looks again whether a write or a layer has ended.

Neither the transport nor a device reports that a write or a layer has ended. So the lane has to look, and each look
costs a turn of the lane (70 us on a cold core). The lane looks again after half of the time that is left: a few looks
find the end. The figure shows writes; a lane awaits layers one by one.

    in flight   200          100      50    25  12 ...  0
    looks       |-------------|-------|-----|---|-.|.|.|      the last ones a millisecond apart
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_FIRST_GUESS_S: Final = 0.00002
"""Mooncake 0.3.13's time for one write over TCP, however small (21 us)."""
SHORTEST_LOOK_S: Final = 0.001
"""The side channel waits in whole milliseconds. 1 ms is short beside a layer and long beside a turn of the lane."""
LONGEST_LOOK_S: Final = 0.008
"""The most by which a lane sees an end late, when a link has become faster. Looks 8 ms apart cost 1 % of a core."""


@dataclass(slots=True)
class WritePace:
    """The time of one write, or of one layer, as seen lately. One lane owns it."""

    write_s: float = _FIRST_GUESS_S
    _since: float = 0.0

    def began(self, *, now: float) -> None:
        """A write is in flight, or a layer awaited, after none was. ``now``: monotonic seconds, here and below."""
        self._since = now

    def looked(self, num_ended: int, *, now: float) -> None:
        """``num_ended`` writes have ended since the last look. Zero proves nothing: a large write may be half done."""
        if num_ended:
            self.write_s = (self.write_s + (now - self._since) / num_ended) / 2
            self._since = now

    def next_look_s(self, num_in_flight: int) -> float:
        """Seconds until looking again is worthwhile, within ``SHORTEST_LOOK_S`` and ``LONGEST_LOOK_S``."""
        return min(max(num_in_flight * self.write_s / 2, SHORTEST_LOOK_S), LONGEST_LOOK_S)
