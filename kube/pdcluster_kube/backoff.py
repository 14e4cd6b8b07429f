"""How long to wait before the API server is asked again. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds. Waits grow from ``first_s`` to 2, 4, 8 ... times it, and at most to ``most_s``."""

    first_s: float
    most_s: float

    def pause_s(self, num_failures: int, chance: float, *, asked_s: float = 0.0) -> float:
        """Wait after so many failures in a row, at least one: between ``first_s`` and the bound to which they have
        raised it.

        ``chance``: in [0, 1), so that those who failed together do not come back together. ``asked_s``: what the API
        server itself asked for (Retry-After); the caller bounds it.
        """
        ceiling = min(self.most_s, math.ldexp(self.first_s, min(num_failures, 16)))
        return max(asked_s, self.first_s + chance * (ceiling - self.first_s))
