"""The order in which those that wait are let in: the flows of one priority take turns by tokens.

    priority 0   flow a  tag  700   [ 60 | 60 | 60 | ... ]     the next one: lowest priority, then lowest tag
                 flow b  tag  705   [ 500 ]                    let in: its tag is 1205 from now on (weight 1)
    priority 5   flow c  tag    0   [ 10 | 10 ]                has a turn when it had none for ``turn_s``

Start-time fair queueing (Goyal, Vin, Cheng 1996), with the tags kept by flow and not by request: one that leaves
without having been let in is not charged. docs/decisions/0039-fair-queue.md has the reasons. Knows no limits and no
clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, Generic, TypeAlias, TypeVar

Waiter = TypeVar("Waiter", bound=Hashable)

MAX_WEIGHT: Final = 100
MAX_PRIORITY: Final = 10
_FIRST: Final = -1_000_000
"""Added to the priority of one whose turn has come."""


@dataclass(frozen=True, slots=True)
class KeyFlow:
    """Requests that have one line together: those of one API key's name."""

    name: str
    weight: int = 1
    """In [1, ``MAX_WEIGHT``]: a flow with 3 is let in for three times the tokens of one with 1."""
    priority: int = 0
    """In [-``MAX_PRIORITY``, ``MAX_PRIORITY``]; the lower value is let in earlier, as in vLLM."""


NO_KEY: Final = KeyFlow("")
"""The flow of all requests that show no key."""


class _Line(Generic[Waiter]):
    """The requests of one flow that wait, in the order of arrival. Never empty while it is in its class."""

    __slots__ = ("costs", "flow", "number", "tag")

    def __init__(self, flow: KeyFlow, tag: float, number: int) -> None:
        self.flow = flow
        self.tag = tag
        """Tokens that its flow has been let in for, divided by its weight."""
        self.number = number
        """Of two lines with one tag the lower number is first."""
        self.costs: OrderedDict[Waiter, int] = OrderedDict()


class _Class(Generic[Waiter]):
    """The lines of one priority."""

    __slots__ = ("debts", "lines", "order", "turn_at")

    def __init__(self, now: float) -> None:
        self.lines: dict[KeyFlow, _Line[Waiter]] = {}
        self.order: list[tuple[float, int, _Line[Waiter]]] = []
        """The same lines, sorted by tag and number."""
        self.debts: dict[KeyFlow, float] = {}
        """The tags of flows of which none waits, while others wait: at most one for each key."""
        self.turn_at = now
        """When it was let in last, or came."""

    def line_of(self, flow: KeyFlow, number: int) -> _Line[Waiter]:
        """The flow's line. A new one begins at the lowest tag, or at the flow's own."""
        line = self.lines.get(flow)
        if line is None:
            lowest = self.order[0][0] if self.order else 0.0
            line = self.lines[flow] = _Line(flow, max(lowest, self.debts.pop(flow, 0.0)), number)
            insort(self.order, (line.tag, number, line))
        return line

    def remove(self, line: _Line[Waiter]) -> None:
        """No request of the line waits any more. Its tag is kept, so that a flow gains nothing by coming back."""
        self._take_out(line)
        del self.lines[line.flow]
        self.debts[line.flow] = line.tag

    def charge(self, line: _Line[Waiter], cost: int) -> None:
        """``cost`` tokens of the flow have been let in."""
        self._take_out(line)
        line.tag += cost / line.flow.weight
        insort(self.order, (line.tag, line.number, line))

    def _take_out(self, line: _Line[Waiter]) -> None:
        del self.order[bisect_left(self.order, (line.tag, line.number))]


_Entry: TypeAlias = tuple[int, float, int, Waiter, _Line[Waiter], Iterator[Waiter]]
"""Priority, tag and number of a line, the next of its requests, the line, and those after it."""


class FairQueue(Generic[Waiter]):
    """All that wait for one backlog. One owner."""

    def __init__(self, turn_s: float) -> None:
        """``turn_s``: seconds after which a priority has a turn although earlier ones wait."""
        self._turn_s = turn_s
        self._classes: dict[int, _Class[Waiter]] = {}
        self._num_lines = 0

    def add(self, waiter: Waiter, flow: KeyFlow, cost: int, *, now: float) -> None:
        """``waiter`` is the last one in its flow's line. ``cost``: in tokens."""
        own_class = self._classes.get(flow.priority)
        if own_class is None:
            own_class = self._classes[flow.priority] = _Class(now)
        self._num_lines += 1
        own_class.line_of(flow, self._num_lines).costs[waiter] = cost

    def let_in(self, waiter: Waiter, flow: KeyFlow, *, now: float) -> None:
        """``waiter`` waits no more, and its flow is charged."""
        own_class = self._classes[flow.priority]
        own_class.turn_at = now
        line = own_class.lines[flow]
        own_class.charge(line, line.costs[waiter])
        self.remove(waiter, flow)

    def remove(self, waiter: Waiter, flow: KeyFlow) -> None:
        """``waiter`` waits no more, and its flow is not charged."""
        own_class = self._classes[flow.priority]
        line = own_class.lines[flow]
        del line.costs[waiter]
        if not line.costs:
            own_class.remove(line)
        if not own_class.lines:
            del self._classes[flow.priority]

    def clear(self) -> None:
        """None waits any more."""
        self._classes.clear()

    def in_order(self, most: int, *, now: float) -> Iterator[Waiter]:
        """Those that are to be let in next, ``most`` of them at most. Add and remove none until it has ended."""
        entries = [entry for priority in self._classes for entry in self._heads(priority, most, now)]
        heapify(entries)
        for _ in range(most):
            if not entries:
                return
            _, tag, number, waiter, line, rest = heappop(entries)
            yield waiter
            after = next(rest, None)
            if after is not None:
                tag += line.costs[waiter] / line.flow.weight
                heappush(entries, (line.flow.priority, tag, number, after, line, rest))

    def displaced_by(self, flow: KeyFlow) -> Waiter | None:
        """The one that gives its place to a new request of ``flow`` where there is none left: the newest of the flow
        with the most places by weight. No flow gives its only place, and one that has none gets one: by weight alone
        one with 1 would have none beside one with 100. None: there is no such place. Costs a look at each flow that
        waits.
        """
        own_class = self._classes.get(flow.priority)
        own = own_class.lines.get(flow) if own_class is not None else None
        lines = [line for each in self._classes.values() for line in each.lines.values() if len(line.costs) > 1]
        most = max(lines, key=lambda line: len(line.costs) / line.flow.weight, default=None)
        if most is None:
            return None
        if own is not None and len(most.costs) / most.flow.weight <= (len(own.costs) + 1) / flow.weight:
            return None
        return next(reversed(most.costs))

    def _heads(self, priority: int, most: int, now: float) -> Iterator[_Entry[Waiter]]:
        """The first request of each line that may be among the next ``most``."""
        own_class = self._classes[priority]
        rank = priority + _FIRST if now >= own_class.turn_at + self._turn_s else priority
        for tag, number, line in islice(own_class.order, most):
            rest = iter(line.costs)
            yield rank, tag, number, next(rest), line, rest
            rank = priority  # The turn is for one request.
