"""A clock for the router in this process, by which no time passes while the machine does something else."""

from __future__ import annotations

import asyncio
import time
from typing import Final

TICK_S: Final = 0.005
MOST_S: Final = 0.02
"""What counts of the time between two looks. A turn of the loop takes less; a process that stands still takes more."""


class RunningClock:
    """Seconds for which this process has run. Deadlines of a second or two that hold for a request's whole way can then
    be reached by what is to reach them alone, and not by a machine that gives the process no core for that long."""

    def __init__(self) -> None:
        self._now = self._looked_at = time.monotonic()

    def now(self) -> float:
        looked_at = time.monotonic()
        self._now += min(looked_at - self._looked_at, MOST_S)
        self._looked_at = looked_at
        return self._now

    async def run(self) -> None:
        """Looks at the time again and again, until it is cancelled: a loop that only waits takes no turn."""
        while True:
            await asyncio.sleep(TICK_S)
            self.now()
