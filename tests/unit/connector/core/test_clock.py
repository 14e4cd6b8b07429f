"""Running time: what passes while a process is stopped does not count."""

from __future__ import annotations

from pdcluster_connector.core.clock import RunningClock


def test_running_time_is_monotonic_time_while_the_process_runs() -> None:
    clock = RunningClock(100.0)
    assert [clock.read(at, max_step_s=1.5) for at in (100.0, 101.0, 102.5)] == [100.0, 101.0, 102.5]


def test_a_stop_of_an_hour_counts_as_one_step() -> None:
    clock = RunningClock(100.0)
    clock.read(101.0, max_step_s=1.5)
    assert clock.read(3701.0, max_step_s=1.5) == 102.5
    assert clock.read(3702.0, max_step_s=1.5) == 103.5
