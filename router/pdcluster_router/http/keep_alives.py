"""Writes comments into silent streams: ``core/requests/keep_alive.py`` says when.

    Router --watch()--> KeepAlives --one timer for all streams--> HotCycle.comment()
                            ^-------------- forget() ------------- HotCycle, at its end

Watches a stream from its request's arrival to its last byte, wherever it waits: in the queue, for decode, for prefill,
between two tokens. A stream costs a place in a dictionary, and a look every half of ``keep_alive_s``. The looks of
many streams come at different times, as their requests did.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from pdcluster_router.core.requests.keep_alive import LOOKS, Silence
from pdcluster_router.http.cycle import HotCycle

MIN_TICK_S: Final = 0.05
"""The timer rests this long between two rounds, so that a crowd of streams does not wake the loop for each."""
MOST_LOOKS: Final = 256
"""The most looks in one turn of the loop. When the router has stood still, the looks of all streams are due at once,
and 10,000 first comments would take 100 ms."""


class KeepAlives:
    """The watched streams of one router. Event loop only; ``close`` ends its timer."""

    def __init__(
        self,
        keep_alive_s: float,
        now: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        """``keep_alive_s``: 0 for no comments at all. ``now``: monotonic seconds."""
        self.num_comments = 0
        """Comments that were written."""
        self._look_s = _look_s(keep_alive_s)
        self._now = now
        self._call_later = call_later
        self._streams: OrderedDict[HotCycle, _Watched] = OrderedDict()
        """In the order of their next looks."""
        self._timer: asyncio.TimerHandle | None = None

    def set_interval(self, keep_alive_s: float) -> None:
        """``keep_alive_s`` holds from now on, also for the streams that are watched. With 0 none is watched.
        The first comment of a watched stream may come up to half of that sooner."""
        self._look_s = _look_s(keep_alive_s)
        self.close()
        if not self._look_s:
            self._streams.clear()
            return
        latest = self._now() + self._look_s
        for watched in self._streams.values():
            watched.look_at = min(watched.look_at, latest)
        if self._streams:
            self._look()

    def watch(self, cycle: HotCycle) -> None:
        """Watches the stream that the client of ``cycle`` has just asked for."""
        if not self._look_s:
            return
        cycle.on_over = self._forget
        self._streams[cycle] = _Watched(self._now() + self._look_s)
        if self._timer is None:
            self._timer = self._call_later(self._look_s, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget(self, cycle: HotCycle) -> None:
        self._streams.pop(cycle, None)

    def _look(self) -> None:
        """Looks at the streams that are due, and sets the timer again if there are streams."""
        self._timer = None
        now = self._now()
        num_left = MOST_LOOKS
        while (first := next(iter(self._streams.items()), None)) and first[1].look_at <= now and num_left:
            num_left -= 1
            cycle, watched = first
            watched.look_at = now + self._look_s
            self._streams.move_to_end(cycle)
            if watched.is_comment_due(cycle.num_streamed_bytes, may_comment=cycle.may_comment):
                self.num_comments += 1
                cycle.comment()
        if first is not None:
            rest_s = MIN_TICK_S if num_left else 0.0
            self._timer = self._call_later(max(rest_s, first[1].look_at - now), self._look)


def _look_s(keep_alive_s: float) -> float:
    """Seconds between two looks at a stream; 0: there are none."""
    return max(MIN_TICK_S, keep_alive_s / LOOKS) if keep_alive_s else 0.0


class _Watched(Silence):
    """One watched stream."""

    __slots__ = ("look_at",)

    def __init__(self, look_at: float) -> None:
        """``look_at``: the time of the next look, in monotonic seconds."""
        super().__init__()
        self.look_at = look_at
