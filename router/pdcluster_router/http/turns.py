"""Hands whole bodies over, a few in each turn of the event loop.

    whole --enter()--> room in this turn?  yes --> handed over
                                           no  --> waits --next turn, its place in the row--> handed over
                                                     +--client gone--> skipped: it kept its place and nothing else

Each connection is read in small pieces, but many may get their last byte in the same turn. To scan all of their bodies
in that turn would stop every stream meanwhile: 32 bodies of 4 MiB took 110 ms of one turn as text, 380 ms as token
ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from pdcluster_router.core.clients.room import SMALL_BYTES
from pdcluster_router.http.cycle import HotCycle

FREE_BYTES: Final = 16 << 10
"""A body of up to so many bytes never waits: its scan costs less than the rest of a request."""

TURN_BYTES: Final = 1 << 20
"""The most bytes that a row hands over in a turn of the loop, or one larger body: 1 ms of text, 5 ms of many values."""


class Row:
    """Bodies in the order in which they came. Event loop only."""

    __slots__ = ("_call_soon", "_hand_over", "_num_bytes", "_waiting")

    def __init__(
        self, hand_over: Callable[[HotCycle], None], call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """``call_soon``: calls a function in the next turn of the loop."""
        self._hand_over = hand_over
        self._call_soon = call_soon
        self._waiting: deque[HotCycle] = deque()
        self._num_bytes = 0
        """Bytes handed over in this turn."""

    def enter(self, cycle: HotCycle) -> None:
        """``cycle`` is handed over, in this turn or a later one."""
        if not self._num_bytes:
            self._call_soon(self._begin_turn)
        if self._waiting or not self._has_room(cycle):
            self._waiting.append(cycle)
        else:
            self._go(cycle)

    def _has_room(self, cycle: HotCycle) -> bool:
        return not self._num_bytes or self._num_bytes + cycle.num_body_bytes <= TURN_BYTES

    def _begin_turn(self) -> None:
        self._num_bytes = 0
        while self._waiting and self._has_room(self._waiting[0]):
            self._go(self._waiting.popleft())
        if self._num_bytes:
            self._call_soon(self._begin_turn)

    def _go(self, cycle: HotCycle) -> None:
        if not cycle.response_complete:
            self._num_bytes += cycle.num_body_bytes
            self._hand_over(cycle)


class Rows:
    """Three rows, for engines' bodies, clients' small ones and clients' large ones: no row waits for another."""

    __slots__ = ("_engines", "_large", "_small")

    def __init__(
        self, hand_over: Callable[[HotCycle], None], call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._engines, self._small, self._large = (Row(hand_over, call_soon) for _ in range(3))

    def enter(self, cycle: HotCycle) -> None:
        """``cycle`` is handed over, in this turn or a later one."""
        if cycle.is_for_engines:
            self._engines.enter(cycle)
        elif cycle.num_body_bytes <= SMALL_BYTES:
            self._small.enter(cycle)
        else:
            self._large.enter(cycle)
