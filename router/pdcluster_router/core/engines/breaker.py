"""When an engine that fails is left alone, and when it is asked again. One breaker for each engine.

    CLOSED --5 failures in a row, or more than half of the last 20 outcomes--> EJECTED for 1, 2, 4 .. 30 s
      ^                                                                           |         ^
      |                                                                    its time is over |
      |                                                                           v         |
      +-- an answer begins -- TRYING <-- the next request is placed there -- HALF_OPEN      |
                                |                                                           |
                                +-- it fails -----------------------------------------------+

A request that has no outcome (its client leaves) decides nothing: after ``TRYING_S`` the next request is tried. Each
ejection begins a new era. Outcomes of requests of an earlier era do not count. So requests that were under way when an
engine was ejected neither eject it again nor bring it back.

Decides from outcomes and times alone. ``core/engines/placement.py`` decides which engine may be asked when every one is
ejected.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NewType

Era = NewType("Era", int)

NUM_IN_A_ROW: Final = 5
"""Failures without a success between them. Fewer may be one bad moment; each further one costs a client a try."""
NUM_OUTCOMES: Final = 20
"""The outcomes that are remembered."""
FIRST_EJECTION_S: Final = 1.0
LAST_EJECTION_S: Final = 30.0
"""An engine that was ejected again and again is asked twice a minute: a restart takes about as long."""
TRYING_S: Final = 5.0
"""Seconds for which a tried request may have no outcome before another one is tried."""

_ALL_OUTCOMES: Final = (1 << NUM_OUTCOMES) - 1


class Circuit(Enum):
    """The values are what the pool's page shows."""

    CLOSED = "closed"
    """The engine gets work."""
    EJECTED = "ejected"
    """The engine gets none until its time is over."""
    HALF_OPEN = "half_open"
    """The engine gets one request."""
    TRYING = "trying"
    """The request of HALF_OPEN runs: the engine gets no other."""


FIRST_ERA: Final = Era(0)
CLOSED: Final = Circuit.CLOSED
"""A name of its own, since each request reads it: through its Enum, Python 3.11 takes eight times as long."""


class Blame(Enum):
    """Whether a failed request is the fault of the engine that had it."""

    ENGINE = "engine"
    """The engine was not there, broke off, or was too slow."""
    PERHAPS = "perhaps"
    """The engine answered an error. It is to blame only if another engine can serve the request. If it were to blame at
    once, a client with a request on which every engine fails would eject them all."""
    NOBODY = "nobody"
    """A limit of ours was reached, the client is slow, or the engine is well and says when to come back."""


class Breaker:
    """One engine's failures. ``take``, ``began``, ``failed`` and ``wake`` return whether ``circuit`` has changed."""

    __slots__ = ("_ejection_s", "_failures", "_num_in_a_row", "_num_known", "circuit", "era", "until")

    def __init__(self) -> None:
        self.circuit = Circuit.CLOSED
        self.era = FIRST_ERA
        """The era of requests that are placed now."""
        self.until = 0.0
        """While EJECTED or TRYING: monotonic seconds at which ``wake`` has something to do."""
        self._ejection_s = 0.0
        self._num_in_a_row = 0
        self._failures = 0
        """One bit for each of the last outcomes, the newest one lowest: 1 is a failure."""
        self._num_known = 0

    @property
    def is_ejected(self) -> bool:
        """Whether the engine gets no request while another one may."""
        return self.circuit is Circuit.EJECTED or self.circuit is Circuit.TRYING

    @property
    def has_just_failed(self) -> bool:
        """Whether the newest outcome is a failure."""
        return self._num_in_a_row > 0

    def take(self, *, now: float) -> bool:
        """A request is placed here."""
        if self.circuit is not Circuit.HALF_OPEN:
            return False
        self.circuit, self.until = Circuit.TRYING, now + TRYING_S
        return True

    def began(self, era: Era) -> bool:
        """The engine has begun to answer a request of ``era``: that closes its circuit."""
        if self.circuit is CLOSED or era != self.era:
            return False
        self.circuit = CLOSED
        self._num_in_a_row = self._failures = self._num_known = 0
        return True

    def succeeded(self, era: Era) -> None:
        """A request of ``era`` has ended well, to its last byte."""
        if era != self.era or not (self._failures or self._ejection_s or self._num_known < NUM_OUTCOMES):
            return  # Of an earlier era; or no failure is remembered, and nothing would change.
        self._num_in_a_row = 0
        self._failures = self._failures << 1 & _ALL_OUTCOMES
        if self._num_known < NUM_OUTCOMES:
            self._num_known += 1
        elif not self._failures:
            self._ejection_s = 0.0

    def failed(self, era: Era, *, now: float) -> bool:
        """A request of ``era`` has failed, and the engine is to blame."""
        if era != self.era or self.circuit is Circuit.EJECTED:
            return False
        self._num_in_a_row += 1
        self._failures = (self._failures << 1 | 1) & _ALL_OUTCOMES
        self._num_known = min(NUM_OUTCOMES, self._num_known + 1)
        if self.circuit is Circuit.CLOSED and not self._is_bad():
            return False
        self._eject(now)
        return True

    def wake(self, *, now: float) -> bool:
        """Lets one request try an ejected engine whose time is over. Returns whether it is over now."""
        if not self.is_ejected or now < self.until:
            return False
        self.circuit = Circuit.HALF_OPEN
        return True

    def _is_bad(self) -> bool:
        is_mostly_failing = self._num_known == NUM_OUTCOMES and 2 * self._failures.bit_count() > NUM_OUTCOMES
        return self._num_in_a_row >= NUM_IN_A_ROW or is_mostly_failing

    def _eject(self, now: float) -> None:
        self._ejection_s = min(LAST_EJECTION_S, 2 * self._ejection_s or FIRST_EJECTION_S)
        self.circuit, self.until = Circuit.EJECTED, now + self._ejection_s
        self.era = Era(self.era + 1)
