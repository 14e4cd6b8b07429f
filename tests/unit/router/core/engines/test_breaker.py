"""The breaker: what ejects an engine, for how long, and what brings it back."""

from __future__ import annotations

from pdcluster_router.core.engines.breaker import (
    LAST_EJECTION_S,
    NUM_IN_A_ROW,
    NUM_OUTCOMES,
    TRYING_S,
    Breaker,
    Circuit,
)


def fail(breaker: Breaker, number: int = NUM_IN_A_ROW, *, now: float = 0.0) -> None:
    for _ in range(number):
        breaker.failed(breaker.era, now=now)


def ejected(*, now: float = 0.0) -> Breaker:
    breaker = Breaker()
    fail(breaker, now=now)
    assert breaker.circuit is Circuit.EJECTED
    return breaker


def tried(breaker: Breaker) -> Breaker:
    """Its time is over, and one request is there."""
    now = breaker.until
    assert breaker.wake(now=now)
    assert breaker.take(now=now)
    assert breaker.circuit is Circuit.TRYING
    return breaker


def test_failures_in_a_row_eject_and_a_success_between_them_does_not_let_them() -> None:
    breaker = Breaker()
    for _ in range(3):
        fail(breaker, NUM_IN_A_ROW - 1)
        assert not breaker.is_ejected
        for _ in range(NUM_IN_A_ROW):
            breaker.succeeded(breaker.era)
    fail(breaker)
    assert breaker.is_ejected
    assert breaker.until == 1.0


def test_more_than_half_of_the_last_outcomes_eject_whatever_their_order() -> None:
    breaker = Breaker()
    for _ in range(NUM_OUTCOMES // 2):
        breaker.succeeded(breaker.era)
        fail(breaker, 1)
    assert not breaker.is_ejected  # Half is not more than half.
    fail(breaker, 2)
    assert breaker.is_ejected


def test_a_few_outcomes_are_no_share_of_anything() -> None:
    breaker = Breaker()
    fail(breaker, NUM_IN_A_ROW - 1)
    breaker.succeeded(breaker.era)
    fail(breaker, NUM_IN_A_ROW - 1)
    assert not breaker.is_ejected


def test_each_ejection_in_a_row_is_twice_as_long_up_to_a_bound() -> None:
    breaker = ejected()
    lengths = [breaker.until]
    for _ in range(6):
        now = tried(breaker).until
        assert breaker.failed(breaker.era, now=now)
        lengths.append(breaker.until - now)
    assert lengths == [1.0, 2.0, 4.0, 8.0, 16.0, LAST_EJECTION_S, LAST_EJECTION_S]


def test_one_request_decides_and_the_next_one_is_placed_elsewhere() -> None:
    breaker = ejected()
    assert not breaker.wake(now=0.99)
    assert breaker.wake(now=1.0)
    assert not breaker.is_ejected
    assert breaker.take(now=1.0)
    assert breaker.is_ejected
    assert not breaker.take(now=1.0)
    assert breaker.began(breaker.era)
    assert breaker.circuit is Circuit.CLOSED


def test_a_trial_that_says_nothing_is_followed_by_another_one() -> None:
    breaker = tried(ejected())
    assert not breaker.wake(now=1.0 + TRYING_S - 0.1)
    assert breaker.wake(now=1.0 + TRYING_S)
    assert breaker.circuit is Circuit.HALF_OPEN


def test_what_was_under_way_before_the_ejection_changes_nothing_after_it() -> None:
    breaker = Breaker()
    before = breaker.era
    fail(breaker)
    for circuit in (Circuit.EJECTED, Circuit.TRYING):
        if circuit is Circuit.TRYING:
            tried(breaker)
        assert not breaker.began(before)
        breaker.succeeded(before)
        assert not breaker.failed(before, now=5.0)
        assert breaker.circuit is circuit


def test_an_engine_that_is_asked_for_want_of_another_is_back_when_it_answers() -> None:
    breaker = ejected()
    assert not breaker.failed(breaker.era, now=0.5)
    assert breaker.until == 1.0
    assert breaker.began(breaker.era)
    assert not breaker.is_ejected


def test_after_many_good_answers_the_next_ejection_is_short_again() -> None:
    breaker = tried(ejected())
    breaker.began(breaker.era)
    fail(breaker, now=10.0)
    assert breaker.until == 12.0
    tried(breaker).began(breaker.era)
    for _ in range(NUM_OUTCOMES + 1):
        breaker.succeeded(breaker.era)
    fail(breaker, now=20.0)
    assert breaker.until == 21.0
