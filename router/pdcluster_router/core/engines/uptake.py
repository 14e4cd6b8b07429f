"""Decides when a request leaves a decode engine that takes up no work, although its probes are well.

vLLM's API server answers ``/health`` while its engine core hangs: ``AsyncLLM.check_health`` (0.32) looks only whether
the core has died. Requests there would wait for their reservation until the limit of the first byte.

    look   the engine has taken up a request since the last look       its time begins anew
           it has not, and another engine is free or has taken one up  after ``limit_s`` the request leaves
           it has not, and the other one has not either                the request stays: both may be full

An engine takes up a request when it reserves blocks, says that it prefills by itself, or begins an answer. One whose
blocks are full takes up none for a while; its waiting requests lose nothing when they leave, for nothing of them was
computed. ``requests/exchange.py`` looks, and carries out what becomes of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class TakesUp(Protocol):
    """An engine, as far as it takes up requests."""

    num_taken_up: int
    """Grows whenever it takes up a request."""

    @property
    def is_well(self) -> bool:
        """Whether it serves, and neither its probes nor its last request speak against it."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether it has no request."""
        ...


class UptakeWatch:
    """The looks of one waiting request at its engine, and at one other engine. Made at the first look."""

    __slots__ = ("_looked_at", "_own", "_rival")

    def __init__(self, engine: TakesUp, *, now: float) -> None:
        """``now``: monotonic seconds."""
        self._own = _Seen(engine)
        self._rival: _Seen | None = None
        self._looked_at = now

    def stuck_s(self, find_rival: Callable[[], TakesUp | None], *, now: float, limit_s: float, most_s: float) -> float:
        """Seconds for which the engine has taken up nothing, at least ``limit_s``; 0: the request stays.

        ``find_rival``: another engine that could have the request. ``most_s``: what one look adds at most. If more time
        has passed, this router was stopped, and has read nothing.
        """
        passed_s = min(now - self._looked_at, most_s)
        self._looked_at = now
        self._own.look(passed_s)
        if self._rival is not None:
            self._rival.look(passed_s)
        if self._rival is None or not self._rival.takes_requests(limit_s):
            engine = find_rival()
            self._rival = None if engine is None else _Seen(engine)
        is_other_well = self._rival is not None and self._rival.takes_requests(limit_s)
        return self._own.silent_s if is_other_well and self._own.silent_s >= limit_s else 0.0


class _Seen:
    """An engine, and what it took up from look to look."""

    __slots__ = ("_engine", "_has_taken_up", "_num_seen", "silent_s")

    def __init__(self, engine: TakesUp) -> None:
        self._engine = engine
        self._num_seen = engine.num_taken_up
        self._has_taken_up = False
        self.silent_s = 0.0
        """Since it took up a request, or was looked at first."""

    def look(self, passed_s: float) -> None:
        self.silent_s += passed_s
        if self._engine.num_taken_up != self._num_seen:
            self._num_seen, self._has_taken_up, self.silent_s = self._engine.num_taken_up, True, 0.0

    def takes_requests(self, limit_s: float) -> bool:
        """Whether it is well, and free or seen to take up a request within ``limit_s``."""
        return self._engine.is_well and (self._engine.is_free or (self._has_taken_up and self.silent_s < limit_s))
