"""Lets requests enter, wait, or be turned away: back-pressure by the backlog of the engines that prefill.

Decode reserves KV blocks as soon as it has a request. A request that would only wait for prefill must not hold
them, so it waits here, where waiting costs a few kilobytes, and enters when prefill has room. A request that decode
prefills by itself waits likewise, for room on the decode engines, in an ``Admission`` of its own.

    room?  --yes--> a share of the backlog until its prefill is over
       |
       +--no--> queue, in turns of the keys --room--> enters
                       |             |
                  full: 429     waited too long: 503

No request counts for more than a quarter of an engine's limit: a long prompt is often in prefill's cache, and four long
prompts at a time cost little where they are not. For ``PASS_S`` a request that does not fit may be passed by smaller
ones that do; after that all others wait for it, so it enters as soon as the backlog has gone down.

``fair_queue.py`` decides the order of the requests that wait: the order of arrival, if all are of one flow.

Counts tokens, as the router estimates them; knows no request, no engine and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Generic

from pdcluster_router.core.clients.fair_queue import NO_KEY, FairQueue, KeyFlow, Waiter
from pdcluster_router.core.clients.turn_log import TurnLog

PASS_S: Final = 2.0
"""Seconds from a request's arrival in which smaller ones may pass it: a few prefills, so a large request mostly finds
room by then."""
MAX_LOOKED_AT: Final = 64
"""The most places that one ``admit`` looks at: it bounds the cost of a full queue."""
_MOST_OF_LIMIT: Final = 4
_TURN_OF_QUEUE: Final = 4
"""A priority that had no turn for a quarter of the longest wait gets one, so that its next requests enter before their
longest wait is over."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """One waiter's place in the queue. Times are monotonic seconds."""

    num_tokens: int
    queued_at: float
    deadline: float
    flow_name: str


class Admission(Generic[Waiter]):
    """One backlog and its queue, of one router process. One owner."""

    def __init__(self, *, engine_tokens: int, max_queued: int, queue_s: float) -> None:
        """``engine_tokens``: backlog for each usable engine; ``queue_s``: the longest wait in the queue, seconds."""
        self.backlog_tokens = 0
        """The shares, in tokens, of all requests that have entered and whose prefill has not ended."""
        self._num_engines = 1
        self._engine_tokens = engine_tokens
        self._most_tokens = max(1, engine_tokens // _MOST_OF_LIMIT)
        self._limit_tokens = engine_tokens
        self._max_queued = max_queued
        self._queue_s = queue_s
        self._queue: dict[Waiter, QueuePlace] = {}
        """In the order of arrival."""
        self._turns: FairQueue[Waiter] = FairQueue(queue_s / _TURN_OF_QUEUE)
        """The same requests in the order in which they enter."""
        self.turn_log = TurnLog()
        """The requests that have entered from the queue."""

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def waiters(self) -> list[Waiter]:
        """The requests that wait, in the order of arrival."""
        return list(self._queue)

    def set_engines(self, num_usable: int) -> None:
        """Sets the limit for so many engines. Without any it is the limit of one: probes may be wrong, so requests
        try."""
        self._num_engines = max(1, num_usable)
        self._limit_tokens = self._num_engines * self._engine_tokens

    def limit(self, *, engine_tokens: int, max_queued: int, queue_s: float, tokens_of: Callable[[Waiter], int]) -> None:
        """Sets other limits, as for a new one. Waiting requests stay, and have the shares that new ones would have.
        Call ``admit`` soon. ``tokens_of``: the tokens of a request that waits, of which it has a share.
        """
        self._engine_tokens, self._max_queued, self._queue_s = engine_tokens, max_queued, queue_s
        self._most_tokens = max(1, engine_tokens // _MOST_OF_LIMIT)
        self._limit_tokens = self._num_engines * engine_tokens
        self._turns.turn_s = queue_s / _TURN_OF_QUEUE
        for waiter, place in self._queue.items():
            share = self.share_of(tokens_of(waiter))
            self._queue[waiter] = replace(place, num_tokens=share)
            self._turns.price(waiter, place.flow_name, share)

    def share_of(self, num_tokens: int) -> int:
        """The share of a request with so many tokens to prefill: at least 1, at most a quarter of an engine's limit."""
        if num_tokens > self._most_tokens:
            return self._most_tokens
        return max(1, num_tokens)

    def enter(self, share: int) -> bool:
        """Whether a request enters now; if so it holds its share of the backlog. False while any other is queued."""
        backlog = self.backlog_tokens
        if self._queue or (backlog > 0 and backlog + share > self._limit_tokens):  # ``_has_room``, without a call.
            return False
        self.backlog_tokens = backlog + share
        return True

    def take_again(self, share: int) -> None:
        """Adds ``share`` to the backlog at once. Neither the limit nor the queue holds it up."""
        self.backlog_tokens += share

    def give_back(self, share: int) -> bool:
        """The share is free again: its prefill has ended, or was not needed. Returns whether to call ``admit`` soon."""
        self.backlog_tokens -= share
        return bool(self._queue)

    def queue(self, waiter: Waiter, share: int, *, now: float, deadline: float, flow: KeyFlow = NO_KEY) -> float | None:
        """The request waits in the queue. Call ``admit`` soon. ``deadline``: the request's own.

        Returns the time until which it waits at most, in monotonic seconds; None: the queue is full, so it does not
        wait.
        """
        if len(self._queue) >= self._max_queued:
            return None
        place = QueuePlace(share, now, min(deadline, now + self._queue_s), flow.name)
        self._queue[waiter] = place
        self._turns.add(waiter, flow, share, now=now)
        return place.deadline

    def displace_for(self, flow: KeyFlow) -> Waiter | None:
        """A request that has left the full queue, so that one of ``flow`` may ``queue``. None: no request has left,
        because ``flow`` has its part of the places, or one place is not enough since ``limit``.
        """
        waiter = self._turns.displaced_by(flow) if len(self._queue) <= self._max_queued else None
        if waiter is not None:
            self.leave(waiter)
        return waiter

    def set_flows(self, flow_of: Callable[[str], KeyFlow], *, now: float) -> None:
        """Gives each flow the weight and priority that ``flow_of`` has for its name. Call ``admit`` soon."""
        self._turns.set_flows(flow_of, now=now)

    def leave(self, waiter: Waiter) -> bool:
        """``waiter`` leaves the queue. Returns whether it was there."""
        place = self._queue.pop(waiter, None)
        if place is None:
            return False
        self._turns.remove(waiter, place.flow_name)
        return True

    def admit(self, *, now: float) -> list[Waiter]:
        """The requests that enter now, in turn, except where a smaller one passes. Each holds its share. ``turn_log``
        ends with these requests.
        """
        entered: list[Waiter] = []
        if self._is_full():
            return entered
        for waiter in self._turns.in_order(MAX_LOOKED_AT, now=now):
            place = self._queue[waiter]
            if self._has_room(place.num_tokens):
                self.backlog_tokens += place.num_tokens
                entered.append(waiter)
            elif now >= place.queued_at + PASS_S or self._is_full():
                break
        for waiter in entered:
            place = self._queue.pop(waiter)
            self._turns.let_in(waiter, place.flow_name, now=now)
            self.turn_log.note(place.flow_name, place.num_tokens)
        return entered

    def expire(self, *, now: float) -> list[Waiter]:
        """Takes the requests that have waited too long out of the queue, and returns them. Costs a look at each that
        waits."""
        late = [waiter for waiter, place in self._queue.items() if now >= place.deadline]
        for waiter in late:
            self.leave(waiter)
        return late

    def clear(self) -> list[Waiter]:
        """Empties the queue. Returns the requests that waited."""
        waiters = list(self._queue)
        self._queue.clear()
        self._turns.clear()
        return waiters

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do. Costs a look at each request that waits."""
        return min((place.deadline for place in self._queue.values()), default=None)

    def retry_after_s(self, *, now: float) -> int:
        """Whole seconds after which asking again may help: the time that the head of the queue has waited so far. A new
        request will probably wait at least as long. In [1, queue_s rounded up].
        """
        place = next(iter(self._queue.values()), None)
        waited_s = now - place.queued_at if place else 0.0
        return max(1, min(ceil(waited_s), ceil(self._queue_s)))

    def _has_room(self, share: int) -> bool:
        backlog = self.backlog_tokens
        return backlog <= 0 or backlog + share <= self._limit_tokens

    def _is_full(self) -> bool:
        """Whether not even the smallest request has room."""
        return self.backlog_tokens >= self._limit_tokens
