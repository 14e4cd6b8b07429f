"""One deadline per request, handed from step to step.

On the wire a deadline is the remaining time in whole milliseconds, since clocks of two machines
differ; inside a process it is a monotonic second.
"""

from __future__ import annotations


def deadline_after(remaining_ms: int, *, now: float) -> float:
    """The monotonic second at which ``remaining_ms`` will have passed."""
    return now + remaining_ms / 1000


def remaining_ms(deadline: float, *, now: float) -> int:
    """What is left until ``deadline``, in ms, at least 1: a peer decides for itself that 1 ms is too late."""
    return max(1, int((deadline - now) * 1000))
