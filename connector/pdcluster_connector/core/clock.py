"""Turns deadlines into remaining times and back, and counts only the time in which the process runs.

On the wire a deadline is the remaining time in whole milliseconds, since clocks of two machines differ; inside a
process it is a monotonic second.
"""

from __future__ import annotations


def deadline_after(remaining_ms: int, *, now: float) -> float:
    """The monotonic second at which ``remaining_ms`` will have passed."""
    return now + remaining_ms / 1000


def remaining_ms(deadline: float, *, now: float) -> int:
    """Whole milliseconds until ``deadline``. At least 1, also when it has passed: the peer then lets it pass itself."""
    return max(1, int((deadline - now) * 1000))


class RunningClock:
    """Counts running time: it follows the monotonic clock, but each reading adds no more than ``max_step_s``.

    While a process is stopped (SIGSTOP, a frozen container, a suspended machine), renewals of leases wait in its
    socket. When it resumes, all leases would have lapsed by the monotonic clock. So a receiver counts leases and
    deadlines in running time.
    """

    def __init__(self, monotonic: float) -> None:
        self._last = monotonic
        self._running = monotonic

    def read(self, monotonic: float, *, max_step_s: float) -> float:
        """Running time at ``monotonic`` (seconds, never going back). Starts equal to the monotonic clock.

        ``max_step_s``: the longest time since the last reading if the process was not stopped.
        """
        self._running += min(monotonic - self._last, max_step_s)
        self._last = monotonic
        return self._running
