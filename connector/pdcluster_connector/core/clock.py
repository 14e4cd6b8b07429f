"""One deadline per request, handed from step to step, and a clock that stands still while its process does.

On the wire a deadline is the remaining time in whole milliseconds, since clocks of two machines differ; inside a
process it is a monotonic second.
"""

from __future__ import annotations


def deadline_after(remaining_ms: int, *, now: float) -> float:
    """The monotonic second at which ``remaining_ms`` will have passed."""
    return now + remaining_ms / 1000


def remaining_ms(deadline: float, *, now: float) -> int:
    """The time until ``deadline`` in ms, at least 1: a peer decides for itself that 1 ms is too late."""
    return max(1, int((deadline - now) * 1000))


class RunningClock:
    """Advances with the monotonic clock, but at each reading by no more than its reader can have meant to wait.

    A process that was stopped (SIGSTOP, a frozen container, a suspended machine) finds every lease of its peers lapsed
    when it resumes, though the renewals wait in its socket. So a receiver counts leases and deadlines in the time in
    which it ran.
    """

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
