"""What the user hears of fields that were taken back."""

from __future__ import annotations

from pdcluster_operator.core.status.status_events import EventKind
from pdcluster_operator.core.status.taken_back import (
    CONTEST_S,
    MAX_REMEMBERED,
    TELL_AGAIN_S,
    TakenBack,
    TakenBackLog,
    event_of,
)

SCALED = TakenBack("deployments pool-router", (".spec.replicas",), ("kubectl",))


def test_the_event_says_what_from_whom_and_the_cure() -> None:
    event = event_of(SCALED)
    assert (event.kind, event.reason) == (EventKind.WARNING, "TakenBack")
    assert event.message == (
        "deployments pool-router: .spec.replicas was set by kubectl, and was taken back. "
        "Put the value into the spec: `router.replicas`, or `scaling.mode: External` and a PDRoleScaler for engines."
    )


def test_it_is_told_once_an_hour_whoever_else_takes_something() -> None:
    log = TakenBackLog()
    other = TakenBack(SCALED.ref, SCALED.fields, ("hpa",))
    assert log.note(SCALED, 0)
    assert not log.note(SCALED, TELL_AGAIN_S - 1)
    assert log.note(other, 1)
    assert log.note(SCALED, TELL_AGAIN_S)


def test_twice_within_a_minute_is_a_contest_that_is_told_once_and_once_a_day_is_none() -> None:
    log = TakenBackLog()
    log.note(SCALED, 0)
    assert log.pop_contested() is None
    log.note(SCALED, CONTEST_S - 1)
    assert log.pop_contested() == SCALED
    assert log.pop_contested() is None
    log.note(SCALED, CONTEST_S - 1 + CONTEST_S)
    assert log.pop_contested() is None


def test_a_field_is_contested_whoever_takes_it_the_second_time() -> None:
    log = TakenBackLog()
    other = TakenBack(SCALED.ref, SCALED.fields, ("another name each time",))
    log.note(SCALED, 0)
    log.note(other, 1)
    assert log.pop_contested() == other
    log.note(TakenBack(SCALED.ref, (".spec.paused",), SCALED.by), 2)
    assert log.pop_contested() is None


def test_who_comes_under_another_name_each_time_fills_no_memory() -> None:
    log = TakenBackLog()
    for second in range(20 * MAX_REMEMBERED):
        log.note(TakenBack(f"Deployment default/x{second}", ("spec.replicas",), (f"manager {second}",)), second)
    assert len(log._told_s) <= MAX_REMEMBERED
    assert len(log._taken_s) <= MAX_REMEMBERED


def test_what_was_told_long_ago_is_forgotten_and_what_was_told_last_is_not() -> None:
    log = TakenBackLog()
    first, last = (TakenBack("Deployment default/x", ("spec.replicas",), (name,)) for name in ("a", "b"))
    assert log.note(first, 0)
    assert log.note(last, TELL_AGAIN_S + CONTEST_S)
    assert set(log._told_s) == {last}
    for number in range(MAX_REMEMBERED - 1):
        log.note(TakenBack(f"Deployment default/y{number}", (), ("a",)), TELL_AGAIN_S + CONTEST_S)
    assert not log.note(last, TELL_AGAIN_S + CONTEST_S + 1)
