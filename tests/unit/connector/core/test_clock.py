"""Running time: what passes while a process is stopped does not count."""

from __future__ import annotations

from pdcluster_connector.core.clock import RunningClock, deadline_after, remaining_ms


def test_running_time_is_monotonic_time_while_the_process_runs() -> None:
    clock = RunningClock(100.0)
    assert [clock.read(at, max_step_s=1.5) for at in (100.0, 101.0, 102.5)] == [100.0, 101.0, 102.5]


def test_a_stop_of_an_hour_counts_as_one_step() -> None:
    clock = RunningClock(100.0)
    clock.read(101.0, max_step_s=1.5)
    assert clock.read(3701.0, max_step_s=1.5) == 102.5
    assert clock.read(3702.0, max_step_s=1.5) == 103.5


def test_a_deadline_travels_as_whole_milliseconds_and_as_one_when_it_has_passed() -> None:
    assert [remaining_ms(10.0, now=now) for now in (0.0, 8.7655, 10.0, 99.0)] == [10_000, 1_234, 1, 1]
    assert deadline_after(1_500, now=10.0) == 11.5
