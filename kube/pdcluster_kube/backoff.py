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
        """Wait after ``num_failures`` >= 1 failures in a row: from ``first_s`` up to the longest wait after so many.

        ``chance``: in [0, 1), so that callers that failed together do not come back together. ``asked_s``: seconds that
        the API server asked for (Retry-After), and the least wait; the caller bounds it.
        """
        ceiling = min(self.most_s, math.ldexp(self.first_s, min(num_failures, 16)))
        return max(asked_s, self.first_s + chance * (ceiling - self.first_s))
