"""Decides which key runs next, and when. Keeps keys and times only; reads no clock and runs nothing.

    absent --add--> due at a time --start--> running --finish--> absent, or due when its plan wakes up
                       ^                        |  ^
                       |                        |  +--add: once more afterwards, however often it is called
                       +--------- fail: later and later, up to most_s ---------+

A key never runs twice at a time. Keys start in the order in which they became due, so a busy key holds up no other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from pdcluster_kube.backoff import Backoff

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RetryPace:
    """Seconds. ``gather_s``: how long an event waits for other events of its burst. ``first_s`` and ``most_s`` bound
    ``delay_s``."""

    gather_s: float = 0.05
    first_s: float = 1.0
    most_s: float = 60.0

    def delay_s(self, num_failures: int, chance: float) -> float:
        """The wait after ``num_failures`` in a row, 1 or more: at least ``first_s``, at most ``most_s``.

        The n-th wait is at most 2^n times ``first_s``. ``chance``: in [0, 1), the place between the shortest and the
        longest wait, so that keys that failed together come back at different times.
        """
        return Backoff(self.first_s, self.most_s).pause_s(num_failures, chance)


@dataclass(slots=True)
class _Entry:
    """One key. ``due_at``: None: the key is not due at any time. ``not_before``: no event makes the key due earlier.
    ``is_again``: an event came during the run. ``ticket``: marks the key's valid item in the heap."""

    due_at: float | None = None
    started_at: float | None = None
    not_before: float = -math.inf
    num_failures: int = 0
    is_again: bool = False
    ticket: int = 0


class KeyQueue(Generic[K]):
    """All keys that run, are due, or will be due. One task owns it. ``now`` never goes back."""

    def __init__(self, *, max_running: int, pace: RetryPace) -> None:
        self._max_running = max_running
        self._pace: Final = pace
        self._entries: dict[K, _Entry] = {}
        self._heap: list[tuple[float, int, K]] = []
        """Due times. When a key's due time changes, its old item stays here, with a ticket that is no longer valid."""
        self._num_tickets = 0
        self._num_running = 0

    def __len__(self) -> int:
        """Keys that are due, or running, or will be due."""
        return len(self._entries)

    @property
    def num_running(self) -> int:
        return self._num_running

    def add(self, key: K, now: float) -> None:
        """Something happened: make the key due soon. It runs once for all calls until then."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.started_at is not None:
            entry.is_again = True
        else:
            self._bring_forward(key, entry, now)

    def start_next(self, now: float) -> K | None:
        """Start the key that has been due for longest, and return it. None: no key is due, or enough keys run."""
        if self._num_running >= self._max_running or not self._drop_stale() or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        entry = self._entries[key]
        entry.due_at, entry.started_at = None, now
        self._num_running += 1
        return key

    def finish(self, key: K, now: float, wake_after_s: float | None = None) -> None:
        """The run succeeded. ``wake_after_s``: seconds until the key is due again; None: until something happens."""
        entry = self._stopped(key)
        entry.num_failures, entry.not_before = 0, -math.inf
        if entry.is_again:
            self._bring_forward(key, entry, now)
        if wake_after_s is not None:
            self._set_due(key, entry, now + max(wake_after_s, self._pace.gather_s))
        self._forget_idle(key, entry)

    def fail(self, key: K, now: float, *, chance: float, asked_s: float = 0.0) -> None:
        """The run failed: try again, after a longer wait each time. ``asked_s``: seconds that the API server asked for,
        of which at most ``most_s`` count."""
        entry = self._stopped(key)
        entry.num_failures += 1
        entry.not_before = now + max(self._pace.first_s, min(asked_s, self._pace.most_s))
        self._set_due(key, entry, max(entry.not_before, now + self._pace.delay_s(entry.num_failures, chance)))
        if entry.is_again:
            self._bring_forward(key, entry, now)

    def next_due(self) -> float | None:
        """Time at which ``start_next`` can start a key; None: not before another method was called."""
        if self._num_running >= self._max_running or not self._drop_stale():
            return None
        return self._heap[0][0]

    def overdue_s(self, now: float) -> float:
        """Seconds for which the oldest key has been due or running, for the liveness probe."""
        since = [entry.started_at for entry in self._entries.values() if entry.started_at is not None]
        if self._drop_stale():
            since.append(self._heap[0][0])
        return max(0.0, now - min(since)) if since else 0.0

    def _stopped(self, key: K) -> _Entry:
        entry = self._entries[key]
        assert entry.started_at is not None, "a key that does not run cannot end"
        entry.started_at = None
        self._num_running -= 1
        return entry

    def _bring_forward(self, key: K, entry: _Entry, now: float) -> None:
        entry.is_again = False
        self._set_due(key, entry, max(now + self._pace.gather_s, entry.not_before))

    def _set_due(self, key: K, entry: _Entry, due_at: float) -> None:
        """Make the key due at ``due_at``, unless it is due earlier."""
        if entry.due_at is not None and entry.due_at <= due_at:
            return
        self._num_tickets += 1
        entry.due_at, entry.ticket = due_at, self._num_tickets
        heapq.heappush(self._heap, (due_at, entry.ticket, key))

    def _drop_stale(self) -> bool:
        """Drop items from the front of the heap until the first one is valid. Returns whether an item is left."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return bool(self._heap)

    def _is_valid(self, item: tuple[float, int, K]) -> bool:
        _, ticket, key = item
        entry = self._entries.get(key)
        return entry is not None and entry.due_at is not None and entry.ticket == ticket

    def _forget_idle(self, key: K, entry: _Entry) -> None:
        if entry.due_at is None and entry.started_at is None:
            del self._entries[key]
