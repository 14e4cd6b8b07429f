"""Never two leaders: candidates whose clocks run apart, on a network that delays, loses and stops as it likes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_operator.core.leasing import Candidate, LeaseRecord, LeaseTimes

TIMES: Final = LeaseTimes(15.0, 10.0, 2.0)
STORY_S: Final = 300.0

T = TypeVar("T")
Steps = Generator[float, float, T]
"""Yields the real seconds to wait; is told when that is over."""


@dataclass
class Server:
    """The Lease as it is stored: a record and its version, and writes that ask for a version."""

    record: LeaseRecord | None = None
    version: int = 0

    def store(self, record: LeaseRecord, seen_version: int) -> bool:
        if seen_version != self.version:
            return False
        self.record, self.version = record, self.version + 1
        return True


@dataclass
class Node:
    """One candidate and its clock, in real seconds: ``offset + rate * t``."""

    name: str
    rate: float
    offset: float
    chance: Random
    badness: float
    """Part of all messages that are lost."""
    max_delay_s: float
    candidate: Candidate = field(init=False)
    led: list[tuple[float, float]] = field(default_factory=list)
    """When it believed that it leads, in real seconds."""
    lives_s: float = STORY_S

    def __post_init__(self) -> None:
        self.candidate = Candidate(self.name, TIMES)

    def clock(self, t: float) -> float:
        return self.offset + self.rate * t

    def run(self, server: Server) -> Steps[None]:
        """What ``Leader`` does."""
        t = yield from self._wait(self.chance.uniform(0, 3))
        known: int | None = None
        for lap in itertools.count():
            if t > self.lives_s:
                return
            if known is None or not self.candidate.leads(self.clock(t)):
                t = yield from self._wait(self._delay())
                seen, known = server.record, server.version
                t = yield from self._wait(self._delay())
                if self._is_lost():
                    known = None
                elif seen is not None:
                    self.candidate = self.candidate.observed(seen, self.clock(t))
            if known is not None and self.candidate.may_write(self.clock(t)):
                t, known = yield from self._write(server, known, t, f"{self.name}{lap}")
            t = yield from self._wait(TIMES.retry_s * self.chance.uniform(1, 1.2) / self.rate)

    def _write(self, server: Server, known: int, t: float, renewed: str) -> Steps[tuple[float, int | None]]:
        began, record = self.clock(t), self.candidate.claim(renewed)
        t = yield from self._wait(self._delay())
        is_stored = not self._is_lost() and server.store(record, known)
        t = yield from self._wait(self._delay())
        if not is_stored or self._is_lost():
            return t, None
        self.candidate = self.candidate.written(record, began=began, now=self.clock(t))
        until = (self.candidate.leads_until - self.offset) / self.rate
        if until > t:
            self.led.append((t, until))
        return t, known + 1

    def _wait(self, seconds: float) -> Steps[float]:
        return (yield seconds)

    def _delay(self) -> float:
        return self.chance.expovariate(1) * self.max_delay_s

    def _is_lost(self) -> bool:
        return self.chance.random() < self.badness


def play(nodes: list[Node]) -> None:
    """All of them against one server, in real time."""
    server = Server()
    turns: list[tuple[float, int, Steps[None]]] = []
    tickets = itertools.count()
    for node in nodes:
        steps = node.run(server)
        heapq.heappush(turns, (next(steps), next(tickets), steps))
    while turns:
        t, _, steps = heapq.heappop(turns)
        try:
            heapq.heappush(turns, (t + steps.send(t), next(tickets), steps))
        except StopIteration:
            continue


def overlaps(nodes: list[Node]) -> list[tuple[str, str, float]]:
    """Who led at the same time as whom, and from when on."""
    spans = sorted((since, until, node.name) for node in nodes for since, until in node.led)
    found = []
    latest: tuple[float, str] = (0.0, "")
    for since, until, name in spans:
        if since < latest[0] - 1e-9 and name != latest[1]:
            found.append((latest[1], name, since))
        latest = max(latest, (until, name))
    return found


@given(
    seed=st.integers(0, 2**32),
    rates=st.lists(st.floats(1.0, 1.49), min_size=2, max_size=4),
    badness=st.sampled_from([0.0, 0.1, 0.4, 0.8]),
    max_delay_s=st.sampled_from([0.001, 0.5, 3.0, 12.0]),
)
def test_there_are_never_two_leaders(seed: int, rates: list[float], badness: float, max_delay_s: float) -> None:
    chance = Random(seed)
    nodes = [
        Node(f"n{i}", rate, chance.uniform(-1e6, 1e6), Random(seed + i), badness, max_delay_s, lives_s=_life(chance))
        for i, rate in enumerate(rates)
    ]
    play(nodes)
    assert overlaps(nodes) == []


def _life(chance: Random) -> float:
    """Some are killed in mid-story."""
    return chance.choice([STORY_S, chance.uniform(20, STORY_S)])


def test_clocks_that_run_apart_by_more_than_that_let_two_lead() -> None:
    """The law's own bound, and that the stories above would show a breach."""
    found = []
    for seed in range(200):
        nodes = [
            Node("slow", 1.0, 0.0, Random(seed), 0.6, 0.5),
            Node("fast", 3.0, 0.0, Random(seed + 1), 0.0, 0.5),
        ]
        play(nodes)
        found += overlaps(nodes)
    assert found


@given(seed=st.integers(0, 2**32), killed_at=st.floats(10, 100))
def test_when_the_leader_dies_another_one_leads_within_two_durations(seed: int, killed_at: float) -> None:
    nodes = [Node(f"n{i}", 1.0, 0.0, Random(seed + i), 0.0, 0.05) for i in range(2)]
    for node in nodes:
        node.lives_s = killed_at if node is nodes[seed % 2] else STORY_S
    play(nodes)
    spans = sorted(span for node in nodes for span in node.led)
    covered = spans[0][0]
    assert covered < 2 * TIMES.duration_s
    for since, until in spans:
        assert since - covered < TIMES.duration_s
        covered = max(covered, until)
    assert covered >= STORY_S
