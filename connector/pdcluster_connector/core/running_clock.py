"""A clock that stands still while its process does.

A process that was stopped (SIGSTOP, a frozen container, a suspended machine) finds every lease of its peers
lapsed when it resumes, though the renewals wait in its socket. Leases and deadlines of a receiver are
therefore counted in the time in which it ran.
"""

from __future__ import annotations


class RunningClock:
    """Advances with the monotonic clock, but by no more than ``max_step_s`` from one reading to the next."""

    def __init__(self, monotonic: float, *, max_step_s: float) -> None:
        self._last = monotonic
        self._running = monotonic
        self._max_step_s = max_step_s

    def read(self, monotonic: float) -> float:
        """Running time at ``monotonic`` (seconds, never going back). Starts equal to the monotonic clock."""
        self._running += min(monotonic - self._last, self._max_step_s)
        self._last = monotonic
        return self._running
