"""The log of turns: whose requests were let in between two moments, and that it is bounded."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings

from drawn import drawn
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.clients.fair_queue import KeyFlow
from pdcluster_router.core.clients.turn_log import MAX_LOOKED_AT, MAX_TURNS, LineTurns, TurnLog


def log_of(*turns: tuple[str, int]) -> TurnLog:
    log = TurnLog()
    for name, num_tokens in turns:
        log.note(name, num_tokens)
    return log


def test_turns_are_summed_up_by_key_most_tokens_first() -> None:
    log = log_of(("a", 10), ("a", 10), ("b", 30), ("a", 10), ("b", 5))
    assert log.num_turns == 5
    assert log.between(2, 4) == [LineTurns("b", 1, 30), LineTurns("a", 1, 10)]
    assert log.between(0, 2) == [LineTurns("a", 2, 20)]
    assert log.between(3, 3) == []


def test_of_many_turns_the_last_ones_are_summed_up() -> None:
    log = log_of(("old", 1), *[("a", 1)] * MAX_LOOKED_AT)
    assert log.between(0, MAX_LOOKED_AT + 1) == [LineTurns("a", MAX_LOOKED_AT, MAX_LOOKED_AT)]


def test_turns_that_are_forgotten_are_not_told_as_others() -> None:
    log = log_of(*[("a", 1)] * MAX_TURNS, ("b", 2))
    assert log.between(0, 2) == []
    assert log.between(1, 3) == [LineTurns("a", 2, 2)]
    assert log.between(MAX_TURNS - 1, MAX_TURNS + 1) == [LineTurns("b", 1, 2), LineTurns("a", 1, 1)]
    assert log.between(0, MAX_TURNS + 1)[0] == LineTurns("a", MAX_LOOKED_AT - 1, MAX_LOOKED_AT - 1)


@settings(max_examples=drawn(300), deadline=None)
@given(
    turns=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=40),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_a_small_log_tells_what_a_list_of_all_turns_would_or_nothing(
    turns: list[tuple[str, int]], bounds: tuple[int, int]
) -> None:
    first, end = min(*bounds, len(turns)), min(max(bounds), len(turns))
    log = TurnLog(max_turns=16, max_looked_at=8)
    for name, num_tokens in turns:
        log.note(name, num_tokens)
    found = {line.name: (line.num_requests, line.num_tokens) for line in log.between(first, end)}
    looked_at = turns[max(first, end - 8) : end]
    nums, tokens = Counter(name for name, _ in looked_at), Counter[str]()
    for name, num_tokens in looked_at:
        tokens[name] += num_tokens
    is_forgotten = max(first, end - 8) < len(turns) - 16
    assert found == ({} if is_forgotten else {name: (nums[name], tokens[name]) for name in nums})


def test_a_queue_logs_what_enters_from_it_in_order_and_nothing_else() -> None:
    gate: Admission[str] = Admission(engine_tokens=100, max_queued=9, queue_s=40.0)
    assert gate.enter(100)
    for name in ("a1", "a2", "b1", "b2"):
        gate.queue(name, 10, now=0.0, deadline=90.0, flow=KeyFlow(name[0]))
    gate.leave("a2")
    gate.give_back(80)
    assert gate.admit(now=0.0) == ["a1", "b1", "b2"]
    assert gate.turn_log.num_turns == 3
    assert gate.turn_log.between(0, 3) == [LineTurns("b", 2, 20), LineTurns("a", 1, 10)]
    assert gate.turn_log.between(0, 1) == [LineTurns("a", 1, 10)]
