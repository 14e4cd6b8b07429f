"""A clock for the router in this process, by which no time passes while the machine does something else."""

from __future__ import annotations

import asyncio
import time
from typing import Final

TICK_S: Final = 0.005
MOST_S: Final = 0.02
"""What counts of the time between two looks. On a quiet machine a turn of the loop takes less."""


class RunningClock:
    """About the seconds for which this process has run; it lags behind real time. A deadline of a second or two that
    holds for a request's whole way is then reached by what is to reach it alone, and not by a machine that gives this
    process no core for so long.

    It is the clock of ``Services.now`` alone: a test must not race it against real time, as ``asyncio.sleep`` or an
    engine's ``work_s`` of about the deadline, nor compare it with the times of the HTTP layer.
    """

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
