"""Decides when a request leaves a decode engine that takes up no work, although its probes are well.

vLLM's API server answers ``/health`` while its engine core hangs: ``AsyncLLM.check_health`` (0.32) looks only whether
the core has died. Requests there would wait for their reservation until the limit of the first byte.

    look   the engine has taken up a request since the last look       its time begins anew
           it has not, and another engine is free or has taken one up  after ``stuck_s`` the request leaves
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

    num_running: int
    """Requests that are there now."""
    num_taken_up: int
    """Requests that it has taken up so far."""


class UptakeWatch:
    """The looks of one waiting request at its engine, and at one other engine. Made at the first look."""

    __slots__ = ("_looked_at", "_own", "_rival", "_silent_s")

    def __init__(self, engine: TakesUp, *, now: float) -> None:
        """``now``: monotonic seconds."""
        self._own = _Seen(engine)
        self._rival: _Seen | None = None
        self._looked_at = now
        self._silent_s = 0.0

    def stuck_s(self, find_rival: Callable[[], TakesUp | None], *, now: float, limit_s: float, most_s: float) -> float:
        """Seconds for which the engine has taken up nothing, at least ``limit_s``; 0: the request stays.

        ``find_rival``: another engine that could have the request. ``most_s``: what one look adds at most. If more time
        has passed, this router was stopped, and has read nothing.
        """
        self._silent_s += min(now - self._looked_at, most_s)
        self._looked_at = now
        if self._own.has_taken_up():
            self._silent_s = 0.0
        is_other_well = self._is_rival_well(find_rival)
        return self._silent_s if is_other_well and self._silent_s >= limit_s else 0.0

    def _is_rival_well(self, find_rival: Callable[[], TakesUp | None]) -> bool:
        """Whether another engine is free, or has taken up a request since the last look. If the one that was looked at
        is not well, the next look is at another one."""
        rival, self._rival = self._rival, None
        if rival is not None and (rival.has_taken_up() or rival.is_free):
            self._rival = rival
            return True
        if (engine := find_rival()) is not None:
            self._rival = _Seen(engine)
        return self._rival is not None and self._rival.is_free


class _Seen:
    """An engine, and what it had taken up at the last look."""

    __slots__ = ("_engine", "_num_seen")

    def __init__(self, engine: TakesUp) -> None:
        self._engine = engine
        self._num_seen = engine.num_taken_up

    @property
    def is_free(self) -> bool:
        return not self._engine.num_running

    def has_taken_up(self) -> bool:
        """Whether it has taken up a request since the last look."""
        before, self._num_seen = self._num_seen, self._engine.num_taken_up
        return self._num_seen != before
