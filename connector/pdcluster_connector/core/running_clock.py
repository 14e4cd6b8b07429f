"""A clock that stands still while its process does.

A process that was stopped (SIGSTOP, a frozen container, a suspended machine) finds every lease of its peers
lapsed when it resumes, though the renewals wait in its socket. Leases and deadlines of a receiver are
therefore counted in the time in which it ran.
"""

from __future__ import annotations


class RunningClock:
    """Advances with the monotonic clock, but by no more than its reader can have meant to be away."""

    def __init__(self, monotonic: float) -> None:
        self._last = monotonic
        self._running = monotonic

    def read(self, monotonic: float, *, max_step_s: float) -> float:
        """Running time at ``monotonic`` (seconds, never going back). Starts equal to the monotonic clock.

        ``max_step_s``: what may have passed since the last reading if the process has run all the time.
        """
        self._running += min(monotonic - self._last, max_step_s)
        self._last = monotonic
        return self._running
