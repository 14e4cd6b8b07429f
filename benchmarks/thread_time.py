"""Processor time of threads, as the kernel counts it.

Source of truth: proc(5), ``/proc/<pid>/task/<tid>/schedstat``: the first number is nanoseconds on a processor.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LANE_PREFIX: Final = "pdcluster-lane"


def thread_seconds(name_prefix: str) -> float:
    """Processor seconds so far of this process's Python threads whose names begin so."""
    tids = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(name_prefix)]
    return sum(_task_seconds(Path(f"/proc/self/task/{tid}")) for tid in tids if tid is not None)


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds: of the threads that drive the writes, and of the whole process with the transport's own."""

    drivers: float
    process: float

    def __sub__(self, before: Cost) -> Cost:
        return Cost(self.drivers - before.drivers, self.process - before.process)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.drivers + other.drivers, self.process + other.process)


def cost_so_far(driver_prefix: str) -> Cost:
    """Of this process. Drivers that have ended are not in it any more."""
    return Cost(thread_seconds(driver_prefix), time.process_time())


def _task_seconds(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
