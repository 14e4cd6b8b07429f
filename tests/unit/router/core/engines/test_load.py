"""Load: what runs, what has failed lately, and how long answers are."""

from __future__ import annotations

import pytest

from pdcluster_router.core.engines.load import FAILED_HALF_LIFE_S, FIRST_PART, SLOW_START_S, AnswerLength, Load


def test_a_failed_request_counts_for_some_seconds_and_is_forgotten() -> None:
    load = Load(100)
    load.add_failed(80, now=10.0)
    assert load.tokens(now=10.0) == 180
    assert load.tokens(now=10.0 + FAILED_HALF_LIFE_S) == 140
    assert load.tokens(now=100.0) == 100
    assert load.outstanding_tokens == 100


def test_failures_add_up() -> None:
    load = Load()
    for _ in range(3):
        load.add_failed(10, now=0.0)
    assert load.tokens(now=0.0) == 30
    load.add_failed(10, now=FAILED_HALF_LIFE_S)
    assert load.tokens(now=FAILED_HALF_LIFE_S) == 25


@pytest.mark.parametrize(("limit", "expected"), [(None, 256), (10, 10), (256, 256), (1_000_000, 256), (10**30, 256)])
def test_a_limit_is_a_bound_and_no_forecast(limit: int | None, expected: int) -> None:
    assert AnswerLength().expected(limit) == expected


@pytest.mark.parametrize(("num_bytes", "is_stream"), [(200_000, True), (4_000, False)])
def test_what_is_expected_follows_the_answers_that_end(num_bytes: int, is_stream: bool) -> None:
    length = AnswerLength()
    for _ in range(1000):
        length.saw(num_bytes, is_stream=is_stream)
    assert length.expected(None) == pytest.approx(1000, rel=0.01)


def test_one_odd_answer_changes_little() -> None:
    length = AnswerLength()
    length.saw(1 << 40, is_stream=False)
    assert length.expected(None) < 400


@pytest.mark.parametrize(
    ("passed_s", "counts"),
    [(0.0, 100 / FIRST_PART), (SLOW_START_S / 2, 100 / 0.55), (SLOW_START_S, 100), (9 * SLOW_START_S, 100)],
)
def test_what_a_new_engine_has_counts_ten_times_at_first_and_less_and_less(passed_s: float, counts: float) -> None:
    load = Load(100)
    load.start_slowly(now=5.0)
    assert load.tokens(now=5.0 + passed_s) == pytest.approx(counts)


def test_a_new_engine_with_nothing_to_do_has_the_least_to_do() -> None:
    load = Load()
    load.start_slowly(now=5.0)
    assert load.tokens(now=5.0) == 0


def test_a_slow_start_says_how_long_it_lasts() -> None:
    load = Load()
    assert load.slow_start_s(now=5.0) == 0.0
    load.start_slowly(now=5.0)
    assert [load.slow_start_s(now=now) for now in (5.0, 12.0, 15.0, 99.0)] == [10.0, 3.0, 0.0, 0.0]
