"""How long tests wait for what must come. Nothing here is a promise about speed.

A limit ends a test that hangs. What comes late only because other work has the machine's cores is no defect: a limit
that such a machine can reach fails at random. So limits are long, one for all, and cost nothing where the fact comes.
Where time itself is the subject (a deadline that must end something) a test sets that deadline short, leaves all others
long, and asks which of them it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 600.0
"""For a fact or an answer. The longest takes seconds on a quiet machine; beside seven others far longer."""
EDGE_S: Final = 60.0
"""What settings with a bound of 60 s can be given at most: connections on loopback take a millisecond."""
HANGS_S: Final = 3600.0
"""For a whole test with real processes: only what hangs takes an hour."""


def until(is_true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether the fact became true in time. Looked at every half millisecond: for threads of this process."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True
