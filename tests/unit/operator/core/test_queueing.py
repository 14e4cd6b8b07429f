"""Stories of the queue of objects to look at."""

from __future__ import annotations

import pytest

from pdcluster_operator.core.queueing import KeyQueue, RetryPace

PACE = RetryPace(gather_s=0.1, first_s=1.0, most_s=60.0)


def queue_of(*keys: str, max_running: int = 4) -> KeyQueue[str]:
    queue: KeyQueue[str] = KeyQueue(max_running=max_running, pace=PACE)
    for key in keys:
        queue.add(key, 0.0)
    return queue


def test_a_burst_of_events_is_one_run() -> None:
    queue = queue_of("a", "a", "a")
    assert queue.start_next(0.05) is None
    assert queue.start_next(0.1) == "a"
    assert queue.start_next(0.1) is None
    queue.finish("a", 0.2)
    assert len(queue) == 0
    assert queue.next_due() is None


def test_an_event_during_a_run_queues_one_more_run() -> None:
    queue = queue_of("a")
    queue.start_next(0.1)
    queue.add("a", 0.2)
    queue.add("a", 0.3)
    assert queue.start_next(9.0) is None  # Never two at once.
    queue.finish("a", 10.0)
    assert queue.start_next(10.1) == "a"
    queue.finish("a", 10.2)
    assert queue.start_next(99.0) is None


def test_a_plan_says_when_its_object_wakes_up() -> None:
    queue = queue_of("a")
    queue.start_next(0.1)
    queue.finish("a", 1.0, wake_after_s=30.0)
    assert queue.next_due() == 31.0
    assert queue.start_next(30.9) is None
    assert queue.start_next(31.0) == "a"


def test_an_event_comes_before_the_wake_up_and_replaces_it() -> None:
    queue = queue_of("a")
    queue.start_next(0.1)
    queue.finish("a", 1.0, wake_after_s=30.0)
    queue.add("a", 2.0)
    assert queue.start_next(2.1) == "a"
    queue.finish("a", 2.2)
    assert queue.start_next(40.0) is None


def test_a_plan_that_wakes_at_once_does_not_spin() -> None:
    queue = queue_of("a")
    queue.start_next(0.1)
    queue.finish("a", 1.0, wake_after_s=0.0)
    assert queue.start_next(1.05) is None
    assert queue.start_next(1.1) == "a"


def test_failures_in_a_row_wait_longer_and_a_good_run_forgets_them() -> None:
    queue = queue_of("a")
    now, waits = 0.1, []
    for _ in range(3):
        assert queue.start_next(now) == "a"
        queue.fail("a", now, chance=1.0)
        due = queue.next_due()
        assert due is not None
        waits.append(round(due - now, 6))
        now = due
    assert waits == [2.0, 4.0, 8.0]
    queue.start_next(now)
    queue.finish("a", now)
    queue.add("a", now)
    queue.start_next(now + 0.1)
    queue.fail("a", now, chance=1.0)
    assert queue.next_due() == now + 2.0


def test_an_event_brings_a_failed_one_forward_but_never_makes_it_spin() -> None:
    queue = queue_of("a")
    queue.start_next(0.1)
    queue.fail("a", 0.1, chance=1.0)
    queue.add("a", 0.2)
    assert queue.next_due() == 1.1  # Not 2.1, and not 0.3.


def test_what_the_server_asked_for_is_kept_whatever_happens() -> None:
    queue = queue_of("a")
    queue.start_next(0.1)
    queue.add("a", 0.2)
    queue.fail("a", 0.3, chance=0.0, asked_s=20.0)
    assert queue.next_due() == pytest.approx(20.3)
    queue.add("a", 1.0)
    assert queue.next_due() == pytest.approx(20.3)


def test_no_more_run_than_there_are_workers_and_the_oldest_comes_first() -> None:
    queue = queue_of("a", "b", "c", max_running=2)
    assert [queue.start_next(1.0) for _ in range(3)] == ["a", "b", None]
    assert queue.next_due() is None  # Only an end of a run can help.
    queue.finish("a", 2.0)
    assert queue.start_next(2.0) == "c"


def test_a_busy_key_does_not_hold_up_the_others() -> None:
    queue = queue_of("busy", "quiet", max_running=1)
    assert queue.start_next(1.0) == "busy"
    queue.add("busy", 1.0)
    queue.finish("busy", 1.0)
    assert queue.start_next(5.0) == "quiet"


def test_overdue_is_the_age_of_the_oldest_that_is_due_or_runs() -> None:
    queue = queue_of("a", max_running=1)
    assert queue.overdue_s(0.0) == 0.0
    assert queue.overdue_s(5.1) == pytest.approx(5.0)
    queue.start_next(6.0)
    assert queue.overdue_s(7.0) == pytest.approx(1.0)
    queue.finish("a", 7.0, wake_after_s=100.0)
    assert queue.overdue_s(50.0) == 0.0
