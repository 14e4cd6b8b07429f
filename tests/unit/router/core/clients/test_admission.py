"""Admission: who enters, who waits and for how long, and what those are told who do not."""

from __future__ import annotations

import pytest

from pdcluster_router.core.clients.admission import PASS_S, Admission


def admission(engine_tokens: int = 100, max_queued: int = 3, queue_s: float = 30.0) -> Admission[str]:
    return Admission(engine_tokens=engine_tokens, max_queued=max_queued, queue_s=queue_s)


def full(**given: int) -> Admission[str]:
    """One whose backlog is at its limit."""
    gate = admission(**given)
    assert gate.enter(100)
    return gate


def test_requests_enter_while_the_backlog_has_room() -> None:
    gate = admission()
    assert [gate.enter(40) for _ in range(3)] == [True, True, False]
    assert gate.backlog_tokens == 80


def test_a_prompt_larger_than_the_limit_enters_alone() -> None:
    gate = admission()
    assert gate.enter(1000)
    assert not gate.enter(1)
    gate.give_back(1000)
    assert gate.enter(1)
    assert not gate.enter(1000)


def test_the_limit_follows_the_healthy_engines_and_none_counts_as_one() -> None:
    gate = full()
    gate.set_engines(3)
    assert gate.enter(200)
    gate.set_engines(0)
    assert not gate.enter(1)
    gate.give_back(201)
    assert gate.enter(1)


def waiting(*guests: tuple[str, int]) -> Admission[str]:
    """A full one, and who waits since 0."""
    gate = full()
    for name, share in guests:
        assert gate.queue(name, share, now=0.0, deadline=9.0) == 9.0
    return gate


def test_who_waits_enters_in_the_order_of_arrival() -> None:
    gate = waiting(("a", 60), ("b", 60), ("c", 60))
    gate.give_back(50)
    assert gate.admit(now=0.0) == []
    assert not gate.enter(1)
    gate.give_back(50)
    assert gate.admit(now=0.0) == ["a"]
    gate.give_back(60)
    assert gate.admit(now=0.0) == ["b"]
    assert (gate.backlog_tokens, gate.num_queued) == (60, 1)


def test_a_small_request_passes_a_large_one_for_a_while_and_then_waits_for_it() -> None:
    gate = waiting(("large", 60), ("small", 10), ("smaller", 5))
    gate.give_back(50)
    assert gate.admit(now=PASS_S - 0.1) == ["small", "smaller"]
    gate.queue("late", 5, now=PASS_S - 0.1, deadline=9.0)
    assert gate.admit(now=PASS_S) == []
    gate.give_back(25)
    assert gate.admit(now=PASS_S) == ["large"]


def test_nothing_is_looked_for_while_there_is_no_room_at_all() -> None:
    gate = waiting(*[(str(number), 1) for number in range(3)])
    assert gate.admit(now=0.0) == []


def test_no_request_counts_for_more_than_a_quarter_so_that_four_long_ones_run_at_a_time() -> None:
    gate = admission()
    assert [gate.share_of(tokens) for tokens in (0, 1, 25, 26, 10**9)] == [1, 1, 25, 25, 25]
    assert [gate.enter(gate.share_of(10**6)) for _ in range(5)] == [True] * 4 + [False]
    assert admission(engine_tokens=1).share_of(10) == 1


def test_when_the_head_leaves_one_behind_it_may_enter() -> None:
    gate = waiting(("large", 60), ("small", 40))
    gate.give_back(50)
    assert gate.admit(now=PASS_S) == []
    gate.leave("large")
    assert gate.admit(now=PASS_S) == ["small"]


def test_a_full_queue_takes_nobody() -> None:
    gate = full(max_queued=1)
    assert gate.queue("a", 1, now=0.0, deadline=9.0) is not None
    assert gate.queue("b", 1, now=0.0, deadline=9.0) is None
    assert gate.num_queued == 1


def test_nobody_waits_longer_than_the_queue_allows_or_the_request_has() -> None:
    gate = full()
    assert gate.queue("patient", 1, now=10.0, deadline=100.0) == 40.0
    assert gate.queue("hasty", 1, now=10.0, deadline=20.0) == 20.0
    assert gate.next_deadline() == 20.0
    assert gate.expire(now=19.9) == []
    assert gate.expire(now=20.0) == ["hasty"]
    assert gate.expire(now=40.0) == ["patient"]
    assert gate.next_deadline() is None


def test_a_share_that_is_taken_again_does_not_queue() -> None:
    gate = full()
    gate.take_again(50)
    assert gate.backlog_tokens == 150


def test_a_guest_that_leaves_twice_or_was_never_there_is_no_matter() -> None:
    gate = full()
    gate.queue("a", 1, now=0.0, deadline=9.0)
    gate.leave("a")
    gate.leave("a")
    assert (gate.num_queued, gate.clear()) == (0, [])


@pytest.mark.parametrize(("now", "seconds"), [(0.0, 1), (0.2, 1), (7.2, 8), (500.0, 30)])
def test_come_back_in_as_long_as_the_head_of_the_queue_has_waited(now: float, seconds: int) -> None:
    gate = full()
    gate.queue("head", 1, now=0.0, deadline=900.0)
    gate.queue("tail", 1, now=now, deadline=900.0)
    assert gate.retry_after_s(now=now) == seconds


def test_come_back_in_a_second_when_nobody_waits() -> None:
    assert admission().retry_after_s(now=5.0) == 1


def test_a_limit_that_is_set_later_is_one_for_each_engine() -> None:
    gate = admission(engine_tokens=100)
    gate.set_engines(3)
    gate.limit(engine_tokens=40, max_queued=3, queue_s=30.0, tokens_of=len)
    assert [gate.enter(40) for _ in range(4)] == [True, True, True, False]


def test_who_waits_has_the_share_of_the_limit_that_is_set_later() -> None:
    gate = waiting(("a", 25))
    gate.limit(engine_tokens=400, max_queued=3, queue_s=30.0, tokens_of=lambda _: 1000)
    assert gate.admit(now=0.0) == ["a"]
    assert gate.backlog_tokens == 100 + 400 // 4
