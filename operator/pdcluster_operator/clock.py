"""The operator's clocks. The shell reads them; ``core`` takes times as arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

_BOOT_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux has a clock that counts the time in which the machine sleeps. Other systems' clocks may not count it."""

Clock = Callable[[], float]
"""Returns seconds since some fixed moment; never goes back."""


def steady_s() -> float:
    """Seconds, with those that the machine sleeps: an operator that wakes up must not believe that it still leads."""
    return time.clock_gettime(_BOOT_CLOCK)


def unix_s() -> int:
    """Whole seconds since 1970, as conditions have them."""
    return int(time.time())


def micro_time() -> str:
    """Now, as Kubernetes writes a MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
