"""Limits of a key: what each refuses, what it says, and what a change of the file keeps."""

from __future__ import annotations

import pytest

from pdcluster_router.core.clients.key_limits import (
    EVERY_TOKEN,
    NO_LIMITS,
    KeyLimits,
    KeyUse,
    KeyUses,
    LimitedBy,
    OverLimit,
    RateLeft,
    UnnamedUses,
)

A = "team-a"


def use_of(**limits: int) -> KeyUse:
    use = KeyUse()
    use.limit(KeyLimits(**limits))
    return use


def test_as_many_requests_run_at_once_as_the_limit_says() -> None:
    use = use_of(max_concurrent=2)
    assert [use.enter(1, now=0.0) for _ in range(2)] == [None, None]
    assert use.enter(1, now=0.0) == OverLimit(LimitedBy.MAX_CONCURRENT, limit=2, wanted=1, left=0, retry_after_s=2)
    use.leave()
    assert use.enter(1, now=0.0) is None
    assert use.num_running == 2


def test_a_minutes_requests_may_come_at_once_and_then_as_many_as_the_rate() -> None:
    use = use_of(requests_per_minute=6)
    assert [use.enter(1, now=100.0) for _ in range(6)] == [None] * 6
    told = use.enter(1, now=100.0)
    assert told == OverLimit(LimitedBy.REQUESTS_PER_MINUTE, limit=6, wanted=1, left=0, retry_after_s=10)
    assert use.enter(1, now=109.9) is not None
    assert use.enter(1, now=110.0) is None
    assert [use.enter(1, now=1000.0) is None for _ in range(7)] == [True] * 6 + [False]


def test_prompt_tokens_are_counted_and_what_is_left_is_told() -> None:
    use = use_of(prompt_tokens_per_minute=600)
    assert use.enter(500, now=0.0) is None
    told = use.enter(200, now=0.0)
    assert told == OverLimit(LimitedBy.PROMPT_TOKENS_PER_MINUTE, limit=600, wanted=200, left=100, retry_after_s=10)
    assert use.enter(100, now=0.0) is None
    assert use.enter(200, now=20.0) is None


def test_a_prompt_larger_than_a_minutes_tokens_is_told_that_waiting_does_not_help() -> None:
    use = use_of(prompt_tokens_per_minute=600)
    told = use.enter(601, now=0.0)
    assert told == OverLimit(LimitedBy.PROMPT_TOKENS_PER_MINUTE, limit=600, wanted=601, left=600, retry_after_s=None)


def test_the_limit_that_takes_the_longest_is_told() -> None:
    use = use_of(max_concurrent=1, requests_per_minute=1, prompt_tokens_per_minute=60)
    assert use.enter(60, now=0.0) is None
    assert [over and (over.by, over.retry_after_s) for over in [use.enter(30, now=0.0), use.enter(60, now=0.0)]] == [
        (LimitedBy.REQUESTS_PER_MINUTE, 60),
        (LimitedBy.PROMPT_TOKENS_PER_MINUTE, 60),
    ]
    over = use.enter(1, now=60.0)
    assert over is not None
    assert over.by is LimitedBy.MAX_CONCURRENT


def test_a_refusal_by_one_limit_takes_nothing_of_another() -> None:
    use = use_of(requests_per_minute=2, prompt_tokens_per_minute=60)
    assert use.enter(60, now=0.0) is None
    told = use.enter(1, now=0.0)
    assert told is not None
    assert told.by is LimitedBy.PROMPT_TOKENS_PER_MINUTE
    assert use.enter(0, now=0.0) is None


def test_what_was_refused_is_counted_by_its_limit() -> None:
    use = use_of(max_concurrent=1, prompt_tokens_per_minute=10)
    use.enter(1, now=0.0)
    use.enter(1, now=0.0)
    use.enter(11, now=0.0)
    assert [use.num_refused[by] for by in LimitedBy] == [1, 0, 1]


def test_a_key_without_limits_is_not_counted() -> None:
    assert KeyUses({A: KeyLimits(1)}).of("team-b") is None


def test_limits_that_change_keep_what_runs_and_the_share_that_is_left() -> None:
    uses = KeyUses({A: KeyLimits(2, 10)})
    use = uses.of(A)
    assert use is not None
    for _ in range(2):
        assert use.enter(1, now=0.0) is None
    uses.set_limits({A: KeyLimits(3, 100)})
    assert uses.of(A) is use
    assert use.enter(1, now=0.0) is None
    told = use.enter(1, now=0.0)
    assert told is not None
    assert told.by is LimitedBy.MAX_CONCURRENT
    for _ in range(3):
        use.leave()
    uses.set_limits({A: KeyLimits(None, 100)})
    assert sum(use.enter(1, now=0.0) is None for _ in range(100)) == 79


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_key_that_loses_its_limits_is_known_while_a_request_of_it_runs(*, comes_back: bool) -> None:
    uses = KeyUses({A: KeyLimits(1)})
    use = uses.of(A)
    assert use is not None
    assert use.enter(1, now=0.0) is None
    uses.set_limits({})
    assert use.enter(1, now=0.0) is None
    if comes_back:
        uses.set_limits({A: KeyLimits(2)})
        assert use.enter(1, now=0.0) is not None
    use.leave()
    use.leave()
    uses.set_limits({})
    assert uses.of(A) is None


def test_no_limits_refuse_nothing() -> None:
    use = KeyUse()
    use.limit(NO_LIMITS)
    assert [use.enter(10**9, now=0.0) for _ in range(100)] == [None] * 100


def test_what_is_left_of_a_rate_of_requests_is_told_and_when_it_is_whole_again() -> None:
    use = KeyUse()
    assert use.requests_left(0.0) is None
    use.limit(KeyLimits(requests_per_minute=6))
    assert use.requests_left(0.0) == RateLeft(6, left=6, full_in_s=0.0)
    assert use.enter(1, now=0.0) is None
    assert use.enter(1, now=0.0) is None
    assert use.requests_left(0.0) == RateLeft(6, left=4, full_in_s=20.0)
    assert use.requests_left(15.0) == RateLeft(6, left=5, full_in_s=5.0)
    assert use.requests_left(99.0) == RateLeft(6, left=6, full_in_s=0.0)


def held(use: KeyUse, name: str, num_tokens: int, now: float) -> None:
    assert use.enter(num_tokens, now=now) is None
    use.hold(name, num_tokens)


def test_a_request_that_no_engine_got_gives_its_rates_back_once() -> None:
    use = use_of(requests_per_minute=6, prompt_tokens_per_minute=600)
    assert use.enter(100, now=0.0) is None
    held(use, "displaced", 300, now=0.0)
    for _ in range(2):
        use.give_back("displaced", 0.0)
        assert use.requests_left(0.0) == RateLeft(6, left=5, full_in_s=10.0)
        told = use.enter(501, now=0.0)
        assert told is not None
        assert told.left == 500


def test_what_has_flowed_in_again_is_not_given_back_too() -> None:
    """Else a key would get more than its rate by a request that waits: its bucket has been full meanwhile."""
    use = use_of(requests_per_minute=6)
    for name in ("first", "second", "third"):
        held(use, name, 0, now=0.0)
    use.give_back("first", 15.0)
    assert use.requests_left(15.0) == RateLeft(6, left=4, full_in_s=15.0)
    use.give_back("third", 15.0)
    use.give_back("second", 15.0)
    assert [use.enter(0, now=15.0) is None for _ in range(7)] == [True] * 6 + [False]


def test_a_share_that_is_given_back_moves_the_later_ones_forward() -> None:
    use = use_of(requests_per_minute=6)
    held(use, "first", 0, now=0.0)
    held(use, "second", 0, now=0.0)
    use.give_back("first", 0.0)
    assert [use.enter(0, now=15.0) for _ in range(6)] == [None] * 6
    use.give_back("second", 15.0)
    assert use.requests_left(15.0) == RateLeft(6, left=0, full_in_s=60.0), "it has flowed in after 10 s"


def test_one_that_is_let_go_gives_nothing_back() -> None:
    use = use_of(requests_per_minute=6)
    held(use, "one", 0, now=0.0)
    use.let_go("one")
    use.give_back("one", 0.0)
    assert use.requests_left(0.0) == RateLeft(6, left=5, full_in_s=10.0)


def test_limits_that_change_meanwhile_give_back_the_same_share() -> None:
    use = use_of(requests_per_minute=6)
    held(use, "one", 0, now=0.0)
    held(use, "two", 0, now=0.0)
    use.limit(KeyLimits(requests_per_minute=60))
    use.give_back("two", 0.0)
    assert use.requests_left(0.0) == RateLeft(60, left=50, full_in_s=10.0)
    use.limit(NO_LIMITS)
    use.give_back("one", 0.0)
    held(use, "three", 0, now=0.0)
    use.give_back("three", 0.0)
    use.limit(KeyLimits(requests_per_minute=60))
    assert use.requests_left(0.0) == RateLeft(60, left=60, full_in_s=0.0)


@pytest.mark.parametrize("limit", [1, 7, 600, 2_000_000, 999_999_937, 10**9])
@pytest.mark.parametrize("uptime_s", [0.0, 1234.567, 3e7])
def test_what_is_left_of_prompt_tokens_is_exact_and_in_bounds(limit: int, uptime_s: float) -> None:
    use = use_of(prompt_tokens_per_minute=limit)
    left = limit
    for amount in (0, limit // 3, limit // 7, 1, limit // 11):
        if amount <= left:
            assert use.enter(amount, now=uptime_s) is None
            left -= amount
        rate = use.tokens_left(uptime_s)
        assert rate is not None
        assert (rate.per_minute, rate.left) == (limit, left)
    assert use.enter(left, now=uptime_s) is None, "what is told is let in"
    assert [rate and rate.left for rate in (use.tokens_left(uptime_s), use.tokens_left(uptime_s + 61))] == [0, limit]


def test_what_is_left_is_never_below_zero_though_the_limit_is_lowered() -> None:
    use = use_of(prompt_tokens_per_minute=600)
    assert use.enter(600, now=0.0) is None
    use.limit(KeyLimits(prompt_tokens_per_minute=6))
    assert use.tokens_left(0.0) == RateLeft(6, left=0, full_in_s=60.0)
    assert use.requests_left(0.0) is None


def test_each_client_of_tokens_that_no_line_names_has_the_same_limits_and_its_own_use() -> None:
    uses = KeyUses({"jwt:alice": KeyLimits(max_concurrent=2)}, KeyLimits(max_concurrent=1))
    alice, bob = uses.of("jwt:alice"), uses.of("jwt:bob")
    assert alice is not None
    assert bob is not None
    assert [alice.enter(1, now=0.0) for _ in range(2)] == [None, None]
    assert bob.enter(1, now=0.0) is None
    assert bob.enter(1, now=0.0) is not None
    assert uses.of("jwt:bob") is bob
    assert uses.of("jwt:carol") is not bob
    assert uses.of("team-a") is None


def test_metrics_see_all_clients_that_no_line_names_as_one() -> None:
    uses = KeyUses({}, KeyLimits(max_concurrent=1))
    for name in ("jwt:bob", "jwt:carol"):
        use = uses.of(name)
        assert use is not None
        assert [use.enter(1, now=0.0) is None for _ in range(2)] == [True, False]
    ((name, total),) = uses.all()
    assert (name, total.num_running, total.num_refused[LimitedBy.MAX_CONCURRENT]) == (EVERY_TOKEN, 2, 2)


def test_clients_are_counted_in_bounded_memory_and_those_with_a_running_request_stay() -> None:
    uses = UnnamedUses(KeyLimits(max_concurrent=1), most=3)
    first = uses.of("jwt:first")
    first.enter(1, now=0.0)
    gone = uses.of("jwt:gone")
    gone.enter(1, now=0.0)
    gone.enter(1, now=0.0)
    gone.leave()
    for number in range(100):
        uses.of(f"jwt:{number}")
        assert len(uses) <= 3
    assert uses.of("jwt:first") is first
    assert uses.of("jwt:gone") is not gone
    assert (uses.sum.num_running, uses.sum.num_refused[LimitedBy.MAX_CONCURRENT]) == (1, 1)


def test_limits_of_clients_that_no_line_names_may_change_and_go() -> None:
    uses = KeyUses({}, KeyLimits(max_concurrent=1))
    bob = uses.of("jwt:bob")
    assert bob is not None
    bob.enter(1, now=0.0)
    uses.set_limits({}, KeyLimits(max_concurrent=2))
    assert uses.of("jwt:bob") is bob
    assert bob.enter(1, now=0.0) is None
    uses.set_limits({})
    assert uses.of("jwt:bob") is None
    assert list(uses.all()) == []


def test_a_client_of_tokens_keeps_its_use_when_a_line_begins_or_ends_to_name_it() -> None:
    two, one, alice = KeyLimits(max_concurrent=2), KeyLimits(max_concurrent=1), "jwt:alice"
    uses = KeyUses({alice: two}, one)
    use = uses.of(alice)
    assert use is not None
    assert use.enter(1, now=0.0) is None
    for limits in ({}, {alice: one}, {}):
        uses.set_limits(limits, one)
        assert uses.of(alice) is use
        assert use.enter(1, now=0.0) is not None, "one request runs, and one is the most"
        assert [name for name, _ in uses.all()] == [*limits, "jwt:*"]
