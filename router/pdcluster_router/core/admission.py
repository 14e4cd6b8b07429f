"""Who may enter now, who waits, and who is turned away: back-pressure by the prefill engines' backlog.

Decode reserves KV blocks as soon as it has a request. A request that would only wait for prefill must not hold
them, so it waits here, where waiting costs a few kilobytes, and enters when prefill has room.

    room?  --yes--> a share of the backlog until its prefill is over
       |
       +--no--> first come, first served queue --room--> enters
                       |             |
                  full: 429     waited too long: 503

Counts tokens, as the router estimates them; knows no request, no engine and no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil
from typing import Generic, TypeVar

Guest = TypeVar("Guest", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Place:
    """One guest's place in the queue. Times are monotonic seconds."""

    num_tokens: int
    queued_at: float
    deadline: float


class Admission(Generic[Guest]):
    """The backlog and the queue of one router process. One owner."""

    def __init__(self, *, engine_tokens: int, max_queued: int, queue_s: float) -> None:
        """``engine_tokens``: backlog for each healthy prefill engine; ``queue_s``: how long anybody waits."""
        self.backlog_tokens = 0
        """Prompt tokens of all requests that wait for a prefill engine's work, or will."""
        self._engine_tokens = engine_tokens
        self._limit_tokens = engine_tokens
        self._max_queued = max_queued
        self._queue_s = queue_s
        self._queue: OrderedDict[Guest, Place] = OrderedDict()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def set_engines(self, num_healthy: int) -> None:
        """The limit follows the pool. No healthy engine counts as one: the next connection decides, not the probe."""
        self._limit_tokens = max(1, num_healthy) * self._engine_tokens

    def enter(self, num_tokens: int) -> bool:
        """Whether a request enters now; if so it holds its share of the backlog. Nobody passes who waits already."""
        if self._queue or not self._has_room(num_tokens):
            return False
        self.backlog_tokens += num_tokens
        return True

    def take_again(self, num_tokens: int) -> None:
        """A request that has entered is work for prefill once more: it does not queue again."""
        self.backlog_tokens += num_tokens

    def give_back(self, num_tokens: int) -> None:
        """A share is free: the prefill is over, for good or ill, or was not needed. Call ``admit`` soon."""
        self.backlog_tokens -= num_tokens

    def queue(self, guest: Guest, num_tokens: int, *, now: float, deadline: float) -> float | None:
        """Until when the guest waits at most, in monotonic seconds; None: the queue is full.

        ``deadline``: the request's own.
        """
        if len(self._queue) >= self._max_queued:
            return None
        place = Place(num_tokens, now, min(deadline, now + self._queue_s))
        self._queue[guest] = place
        return place.deadline

    def leave(self, guest: Guest) -> None:
        """The guest waits no longer, if it did."""
        self._queue.pop(guest, None)

    def admit(self) -> list[Guest]:
        """Who enters now, in the order of arrival. Each holds its share."""
        entered: list[Guest] = []
        while self._queue:
            guest, place = next(iter(self._queue.items()))
            if not self._has_room(place.num_tokens):
                break
            del self._queue[guest]
            self.backlog_tokens += place.num_tokens
            entered.append(guest)
        return entered

    def expire(self, *, now: float) -> list[Guest]:
        """Who has waited long enough; they wait no longer. Costs a look at everybody who waits."""
        late = [guest for guest, place in self._queue.items() if now >= place.deadline]
        for guest in late:
            del self._queue[guest]
        return late

    def clear(self) -> list[Guest]:
        """Everybody who waited; nobody does now."""
        guests = list(self._queue)
        self._queue.clear()
        return guests

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do. Costs a look at everybody who waits."""
        return min((place.deadline for place in self._queue.values()), default=None)

    def retry_after_s(self, *, now: float) -> int:
        """Whole seconds after which asking again may help: as long as the head of the queue has waited so far.

        That is what a new request would have to wait at least. In [1, queue_s rounded up].
        """
        place = next(iter(self._queue.values()), None)
        waited_s = now - place.queued_at if place else 0.0
        return max(1, min(ceil(waited_s), ceil(self._queue_s)))

    def _has_room(self, num_tokens: int) -> bool:
        backlog = self.backlog_tokens
        return backlog <= 0 or backlog + num_tokens <= self._limit_tokens
