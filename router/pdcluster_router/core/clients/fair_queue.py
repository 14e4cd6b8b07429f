"""The order in which waiting requests are let in: the flows of one priority take turns by tokens.

    priority 0   flow a  tag  700   [ 60 | 60 | 60 | ... ]     the next one: lowest priority, then lowest tag
                 flow b  tag  705   [ 500 ]                    let in: its tag is 1205 from now on (weight 1)
    priority 5   flow c  tag    0   [ 10 | 10 ]                has a turn when it had none for ``turn_s``

Start-time fair queueing (Goyal, Vin, Cheng 1996), with one tag for each flow, not for each request: a request that
leaves without having been let in is not charged. A flow has one line, known by its name: ``set_flows`` gives it another
weight or priority. docs/decisions/0039-fair-queue.md has the reasons. Knows no limits and no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, Generic, TypeAlias, TypeVar

Waiter = TypeVar("Waiter", bound=Hashable)

MAX_WEIGHT: Final = 100
MAX_PRIORITY: Final = 10
MAX_DEBTS: Final = 10_000
"""Kept tags of flows that have left their queue. Clients of tokens may be any number: beyond it, the flow that left
first has the tag of a new one."""
_FIRST: Final = -1_000_000
"""Added to a priority that has its turn."""


@dataclass(frozen=True, slots=True)
class KeyFlow:
    """The requests of one client, by its name: they wait in one line."""

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

    def __init__(self, flow: KeyFlow, number: int) -> None:
        self.flow = flow
        """With its weight and priority of now."""
        self.tag = 0.0
        """Begins as ``put_in`` says. Grows by the tokens that the flow is let in for, divided by its weight."""
        self.number = number
        """Of two lines with one tag the lower number is first."""
        self.costs: OrderedDict[Waiter, int] = OrderedDict()


class _Class(Generic[Waiter]):
    """The lines of one priority."""

    __slots__ = ("debts", "order", "turn_at")

    def __init__(self, now: float) -> None:
        self.order: list[tuple[float, int, _Line[Waiter]]] = []
        """Sorted by tag and number."""
        self.debts: OrderedDict[str, float] = OrderedDict()
        """The kept tags of flows without a waiting request, by name: of ``MAX_DEBTS`` at most."""
        self.turn_at = now
        """When a request of this priority was let in last, or when the first one came. Monotonic seconds."""

    def put_in(self, line: _Line[Waiter]) -> None:
        """Adds a line. Its tag begins at the lowest one here, or at its flow's kept tag if that is higher."""
        line.tag = max(self._lowest_tag(), self.debts.pop(line.flow.name, 0.0))
        insort(self.order, (line.tag, line.number, line))

    def take_out(self, line: _Line[Waiter]) -> None:
        del self.order[bisect_left(self.order, (line.tag, line.number))]

    def remove(self, line: _Line[Waiter]) -> None:
        """No request of the line waits any more. Its tag is kept, so that a flow gains nothing by coming back."""
        self.take_out(line)
        self.debts[line.flow.name] = line.tag
        if len(self.debts) > MAX_DEBTS:
            self.debts.popitem(last=False)

    def charge(self, line: _Line[Waiter], cost: int) -> None:
        """``cost`` tokens of the flow have been let in."""
        self.take_out(line)
        line.tag += cost / line.flow.weight
        insort(self.order, (line.tag, line.number, line))

    def forget_paid(self) -> None:
        """Forgets kept tags that are not above the lowest one: they would change nothing."""
        lowest = self._lowest_tag()
        self.debts = OrderedDict((name, tag) for name, tag in self.debts.items() if tag > lowest)

    def _lowest_tag(self) -> float:
        return self.order[0][0] if self.order else 0.0


_Entry: TypeAlias = tuple[int, float, int, Waiter, _Line[Waiter], Iterator[Waiter]]
"""A line's rank, tag and number, its next request, the line itself, and its requests after that one."""


class FairQueue(Generic[Waiter]):
    """All requests that wait for one backlog. One owner."""

    def __init__(self, turn_s: float) -> None:
        """``turn_s``: seconds after which a priority has a turn although requests of earlier priorities wait."""
        self.turn_s = turn_s
        self._classes: dict[int, _Class[Waiter]] = {}
        """By priority. Each class has at least one line."""
        self._lines: dict[str, _Line[Waiter]] = {}
        """By the flow's name."""
        self._num_lines = 0

    def add(self, waiter: Waiter, flow: KeyFlow, cost: int, *, now: float) -> None:
        """Puts ``waiter`` at the end of its flow's line. The weight and priority in ``flow`` hold from now on.
        ``cost``: in tokens."""
        line = self._lines.get(flow.name)
        if line is None:
            self._num_lines += 1
            line = self._lines[flow.name] = _Line(flow, self._num_lines)
            self._class_of(flow.priority, now).put_in(line)
        elif line.flow is not flow:
            self._change(line, flow, now)
        line.costs[waiter] = cost

    def price(self, waiter: Waiter, name: str, cost: int) -> None:
        """``waiter``, of the flow of this name, costs so many tokens from now on. It keeps its place."""
        self._lines[name].costs[waiter] = cost

    def set_flows(self, flow_of: Callable[[str], KeyFlow], *, now: float) -> None:
        """Gives each flow the weight and priority that ``flow_of`` has for its name. Costs a look at each line."""
        for line in list(self._lines.values()):
            self._change(line, flow_of(line.flow.name), now)
        for each in self._classes.values():
            each.forget_paid()

    def let_in(self, waiter: Waiter, name: str, *, now: float) -> None:
        """``waiter`` waits no more, and its flow, of this name, is charged."""
        line = self._lines[name]
        own_class = self._classes[line.flow.priority]
        own_class.turn_at = now
        own_class.charge(line, line.costs[waiter])
        self.remove(waiter, name)

    def remove(self, waiter: Waiter, name: str) -> None:
        """``waiter`` waits no more, and its flow, of this name, is not charged."""
        line = self._lines[name]
        del line.costs[waiter]
        if not line.costs:
            del self._lines[name]
            self._classes[line.flow.priority].remove(line)
            self._forget_empty(line.flow.priority)

    def clear(self) -> None:
        """No request waits any more."""
        self._classes.clear()
        self._lines.clear()

    def in_order(self, most: int, *, now: float) -> Iterator[Waiter]:
        """The requests to let in next, at most ``most``. Add and remove none until the iteration has ended."""
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
        """The request that makes room for a new one of ``flow`` in a full queue: the newest of the flow with the most
        places by weight. No flow gives its only place, and a flow without a place gets one: by weight
        alone, a flow of weight 1 would have none beside one of weight 100. None: no request makes room. Costs a
        look at each flow that waits.
        """
        own = self._lines.get(flow.name)
        lines = [line for line in self._lines.values() if len(line.costs) > 1]
        most = max(lines, key=lambda line: len(line.costs) / line.flow.weight, default=None)
        if most is None:
            return None
        if own is not None and len(most.costs) / most.flow.weight <= (len(own.costs) + 1) / flow.weight:
            return None
        return next(reversed(most.costs))

    def _class_of(self, priority: int, now: float) -> _Class[Waiter]:
        own_class = self._classes.get(priority)
        if own_class is None:
            own_class = self._classes[priority] = _Class(now)
        return own_class

    def _forget_empty(self, priority: int) -> None:
        if not self._classes[priority].order:
            del self._classes[priority]

    def _change(self, line: _Line[Waiter], flow: KeyFlow, now: float) -> None:
        """The line's flow is ``flow`` from now on. If the priority differs, the line moves to the class of the new
        priority, as a new line. The old class keeps no tag of it."""
        before, line.flow = line.flow.priority, flow
        if flow.priority == before:
            return
        self._classes[before].take_out(line)
        self._forget_empty(before)
        self._class_of(flow.priority, now).put_in(line)

    def _heads(self, priority: int, most: int, now: float) -> Iterator[_Entry[Waiter]]:
        """The first request of each line that may be among the next ``most``."""
        own_class = self._classes[priority]
        rank = priority + _FIRST if now >= own_class.turn_at + self.turn_s else priority
        for tag, number, line in islice(own_class.order, most):
            rest = iter(line.costs)
            yield rank, tag, number, next(rest), line, rest
            rank = priority  # The turn is for one request.
