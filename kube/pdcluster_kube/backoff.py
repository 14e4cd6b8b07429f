"""Decides how long to wait before the API server is asked again. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds. The longest wait is 2, 4, 8 ... times ``first_s`` after 1, 2, 3 ... failures, and at most ``most_s``."""

    first_s: float
    most_s: float

    def pause_s(self, num_failures: int, chance: float, *, asked_s: float = 0.0) -> float:
        """Seconds to wait after ``num_failures`` in a row, 1 or more: at least ``first_s``, and at least ``asked_s``.

        Unless ``asked_s`` is longer, the n-th wait is at most 2^n times ``first_s``, and at most ``most_s``.
        ``chance``: in [0, 1), the place between the shortest and the longest wait, so that callers that failed together
        come back at different times. ``asked_s``: what the API server asked for (Retry-After); the caller bounds it.
        """
        ceiling = min(self.most_s, math.ldexp(self.first_s, min(num_failures, 16)))
        return max(asked_s, self.first_s + chance * (ceiling - self.first_s))
