"""When each process of a router begins and ends."""

from __future__ import annotations

from pdcluster_router.core.processes.succession import (
    END_GRACE_S,
    FIRST_WAIT_S,
    MAX_FAILURES,
    MAX_SILENT_LOOKS,
    SEATS_PER_PLACE,
    START_LIMIT_S,
    STEADY_S,
    EndRouter,
    HurryProcess,
    KillProcess,
    LetLeave,
    RenewalEnded,
    StartProcess,
    StopProcess,
    Succession,
)


def serving(num_places: int = 2) -> Succession:
    """All places have a process that answers, each with the seat of its place's number."""
    succession = Succession(num_places)
    assert succession.begin(now=0.0) == [StartProcess(place, place) for place in range(num_places)]
    for seat in range(num_places):
        assert succession.ready(seat, now=0.0) == []
    return succession


def test_a_process_that_ends_is_started_again_a_little_later() -> None:
    succession = serving()
    assert succession.ended(1, -9, now=STEADY_S) == []
    assert succession.next_at() == STEADY_S + FIRST_WAIT_S
    assert succession.tick(now=STEADY_S) == []
    assert succession.tick(now=STEADY_S + FIRST_WAIT_S) == [StartProcess(1, 1)]


def test_each_end_soon_after_a_start_doubles_the_wait_and_the_fifth_ends_the_router() -> None:
    succession, now, waits = serving(), 0.0, []
    for _ in range(MAX_FAILURES - 1):
        assert succession.ended(0, 1, now=now) == []
        at = succession.next_at()
        assert at is not None
        waits.append(at - now)
        now = at
        assert succession.tick(now=now) == [StartProcess(0, 0)]
        succession.ready(0, now=now)
    assert [round(one / FIRST_WAIT_S, 6) for one in waits] == [1, 2, 4, 8]
    assert succession.ended(0, 1, now=now, drain_s=30.0) == [StopProcess(1)]
    assert succession.next_at() == now + 30.0 + END_GRACE_S
    assert succession.ended(1, 0, now=now) == [EndRouter(1)]


def test_a_process_that_has_served_for_long_fails_for_the_first_time_again() -> None:
    succession, now = serving(), 0.0
    for _ in range(3 * MAX_FAILURES):
        now += STEADY_S
        assert succession.ended(0, 1, now=now) == []
        now += FIRST_WAIT_S
        assert succession.tick(now=now) == [StartProcess(0, 0)]
        succession.ready(0, now=now)


def test_a_router_whose_first_processes_cannot_start_ends_with_their_status() -> None:
    succession = Succession(2)
    succession.begin(now=0.0)
    assert succession.ended(0, 2, now=1.0) == [StopProcess(1)]
    assert succession.ended(1, 0, now=1.0) == [EndRouter(2)]


def test_a_renewal_goes_from_place_to_place_and_a_predecessor_leaves_when_its_successor_is_ready() -> None:
    succession = serving()
    assert succession.renew(now=1.0) == [StartProcess(0, 2)]
    assert succession.ready(2, now=2.0) == [LetLeave(0), StartProcess(1, 3)]
    assert succession.ready(3, now=3.0) == [LetLeave(1), RenewalEnded(0)]
    assert succession.ended(0, 0, now=4.0) == []
    assert succession.renew(now=5.0) == [StartProcess(0, 0)]


def test_a_renewal_during_another_one_replaces_what_that_one_has_started() -> None:
    succession = serving()
    succession.renew(now=1.0)
    assert succession.renew(now=2.0) == []
    assert succession.ready(2, now=3.0) == [LetLeave(0), StartProcess(0, 3)]
    assert succession.ready(3, now=4.0) == [LetLeave(2), StartProcess(1, 4)]
    assert succession.ready(4, now=5.0) == [LetLeave(1), RenewalEnded(0)]


def test_a_renewal_before_all_places_are_served_begins_when_they_are() -> None:
    succession = Succession(2)
    succession.begin(now=0.0)
    assert succession.ready(0, now=1.0) == []
    assert succession.renew(now=2.0) == []
    assert succession.ready(1, now=3.0) == [StartProcess(0, 2)]


def test_a_process_that_started_before_a_renewal_is_replaced_once_it_is_ready() -> None:
    succession = serving()
    succession.ended(1, 1, now=STEADY_S)
    at = STEADY_S + FIRST_WAIT_S
    assert succession.tick(now=at) == [StartProcess(1, 1)]
    assert succession.renew(now=at + 1) == [StartProcess(0, 2)]
    assert succession.ready(2, now=at + 2) == [LetLeave(0)]
    assert succession.ready(1, now=at + 3) == [StartProcess(1, 3)]
    assert succession.ready(3, now=at + 4) == [LetLeave(1), RenewalEnded(0)]


def test_a_successor_that_cannot_start_leaves_its_predecessor_and_the_other_places_alone() -> None:
    succession = serving()
    succession.renew(now=1.0)
    assert succession.ended(2, 2, now=2.0) == [RenewalEnded(2)]
    assert succession.next_at() is None
    assert list(succession._by_seat) == [0, 1]
    assert succession.renew(now=3.0) == [StartProcess(0, 2)]


def test_a_successor_takes_the_place_of_a_predecessor_that_has_ended_meanwhile() -> None:
    succession = serving()
    succession.renew(now=1.0)
    assert succession.ended(0, -9, now=1.5) == [StartProcess(1, 0)]
    assert succession.ready(2, now=2.0) == []
    assert succession.ready(0, now=2.0) == [LetLeave(1), RenewalEnded(0)]


def test_a_renewal_waits_while_too_many_leave() -> None:
    succession, now = serving(1), 0.0
    for _ in range(SEATS_PER_PLACE - 2):
        now += 1.0
        [start] = succession.renew(now=now)
        assert isinstance(start, StartProcess)
        succession.ready(start.seat, now=now)
    now += 1.0
    assert succession.renew(now=now) == []
    assert succession.ended(0, 0, now=now) == [StartProcess(0, 0)]


def test_a_process_that_is_silent_for_long_is_killed_once_and_one_that_speaks_is_not() -> None:
    succession = serving()
    for _ in range(MAX_SILENT_LOOKS):
        assert succession.look() == []
        succession.heard(0)
    assert succession.look() == [KillProcess(1)]
    assert succession.look() == []


def test_a_process_that_starts_may_be_silent() -> None:
    succession = Succession(1)
    succession.begin(now=0.0)
    assert [succession.look() for _ in range(2 * MAX_SILENT_LOOKS)] == [[]] * (2 * MAX_SILENT_LOOKS)


def test_a_process_that_is_never_ready_is_killed_once_and_started_again() -> None:
    succession = serving(1)
    succession.ended(0, 1, now=STEADY_S)
    at = STEADY_S + FIRST_WAIT_S
    succession.tick(now=at)
    assert succession.tick(now=at + START_LIMIT_S) == [KillProcess(0)]
    assert succession.tick(now=at + START_LIMIT_S) == []
    assert succession.ended(0, -9, now=at + START_LIMIT_S) == []
    assert succession.next_at() is not None


def test_a_stop_waits_for_the_drain_and_kills_what_is_left() -> None:
    succession = serving()
    assert succession.stop(now=10.0, drain_s=30.0) == [StopProcess(0), StopProcess(1)]
    assert succession.ended(0, 0, now=11.0) == []
    until = 10.0 + 30.0 + END_GRACE_S
    assert succession.next_at() == until
    assert succession.tick(now=until) == [KillProcess(1)]
    assert succession.ended(1, -9, now=until) == [EndRouter(0)]


def test_a_second_stop_is_passed_on_and_the_wait_gets_short() -> None:
    succession = serving()
    succession.stop(now=10.0, drain_s=3600.0)
    assert succession.stop(now=12.0, drain_s=3600.0) == [HurryProcess(0), HurryProcess(1)]
    assert succession.next_at() == 12.0 + END_GRACE_S
    succession.stop(now=20.0, drain_s=3600.0)
    assert succession.next_at() == 12.0 + END_GRACE_S


def test_nothing_starts_once_it_ends() -> None:
    succession = serving()
    succession.ended(0, 1, now=STEADY_S)
    assert succession.stop(now=STEADY_S, drain_s=0.0) == [StopProcess(1)]
    assert succession.renew(now=STEADY_S) == []
    assert succession.tick(now=STEADY_S + FIRST_WAIT_S) == []
