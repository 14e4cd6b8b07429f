"""Limits of a key, against a plain list of all that was let in: over any interleaving of begins, ends and pauses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
from hypothesis import given, settings

from drawn import drawn
from pdcluster_router.core.clients.key_limits import WINDOW_S, KeyLimits, KeyUse, KeyUses, LimitedBy, OverLimit

MAYBE = st.one_of(st.none(), st.integers(1, 12))
LIMITS = st.builds(KeyLimits, MAYBE, MAYBE, st.one_of(st.none(), st.integers(1, 200)))
STEPS = st.lists(
    st.one_of(
        st.integers(0, 60).map(lambda tokens: ("enter", float(tokens))),
        st.just(("leave", 0.0)),
        st.floats(0, 40).map(lambda seconds: ("wait", seconds)),
    ),
    max_size=80,
)
SLACK = 1e-3
"""Amounts that rounding may let in early."""


@dataclass
class History:
    """Of one key whose limits stay the same."""

    limits: KeyLimits
    use: KeyUse = field(default_factory=KeyUse)
    now: float = 1000.0
    entered: list[tuple[float, int]] = field(default_factory=list)
    num_running: int = 0

    def __post_init__(self) -> None:
        self.use.limit(self.limits)

    def step(self, kind: str, amount: float) -> None:
        if kind == "wait":
            self.now += amount
        elif kind == "leave" and self.num_running:
            self.num_running -= 1
            self.use.leave()
        elif kind == "enter":
            over = self.use.enter(int(amount), now=self.now)
            if over is None:
                self.num_running += 1
                self.entered.append((self.now, int(amount)))
            else:
                self.has_reason(over)

    def has_reason(self, over: OverLimit) -> None:
        """No request is refused that its limits allow."""
        if over.by is LimitedBy.MAX_CONCURRENT:
            assert self.num_running == self.limits.max_concurrent
        else:
            assert over.left < over.wanted


def most_in(entered: list[tuple[float, int]], limit: int) -> None:
    """In no stretch of time more went through than a bucket's worth and what the rate brings meanwhile."""
    for first, (begin, _) in enumerate(entered):
        total = 0
        for end, amount in entered[first:]:
            total += amount
            assert total <= limit * (1 + (end - begin) / WINDOW_S) + SLACK


@settings(max_examples=drawn(1500), deadline=None)
@given(LIMITS, STEPS)
def test_no_limit_is_ever_exceeded_and_every_slot_comes_back(limits: KeyLimits, steps: list[tuple[str, float]]) -> None:
    history = History(limits)
    for kind, amount in steps:
        history.step(kind, amount)
        assert history.use.num_running == history.num_running
        assert limits.max_concurrent is None or history.num_running <= limits.max_concurrent
    if limits.requests_per_minute is not None:
        most_in([(at, 1) for at, _ in history.entered], limits.requests_per_minute)
    if limits.prompt_tokens_per_minute is not None:
        most_in(history.entered, limits.prompt_tokens_per_minute)
    while history.num_running:
        history.step("leave", 0.0)
    assert history.use.num_running == 0
    assert history.use.enter(1, now=history.now + 2 * WINDOW_S) is None, "a key that rests has all of it again"


@settings(max_examples=drawn(1500), deadline=None)
@given(LIMITS, STEPS, st.integers(0, 60))
def test_who_waits_as_long_as_told_is_let_in_and_a_refusal_takes_nothing(
    limits: KeyLimits, steps: list[tuple[str, float]], num_tokens: int
) -> None:
    history = History(limits)
    for kind, amount in steps:
        history.step(kind, amount)
    over = history.use.enter(num_tokens, now=history.now)
    again = history.use.enter(num_tokens, now=history.now) if over is not None else None
    assert again == over, "the first refusal has taken something"
    if over is None:
        return
    while history.num_running:
        history.step("leave", 0.0)
    if over.retry_after_s is None:
        assert num_tokens > (limits.prompt_tokens_per_minute or 0)
        assert history.use.enter(num_tokens, now=history.now + 1e6) is not None
    else:
        assert over.retry_after_s >= 1
        assert history.use.enter(num_tokens, now=history.now + over.retry_after_s) is None


def num_that_enter(history: History) -> int:
    """Requests without a token that are let in one after the other; each limit but that of tokens is drawn on."""
    history.use.limit(replace(history.limits, max_concurrent=None))
    return sum(history.use.enter(0, now=history.now) is None for _ in range(13))


@settings(max_examples=drawn(1500), deadline=None)
@given(LIMITS, STEPS)
def test_a_key_whose_requests_were_refused_has_as_much_left_as_if_they_had_not_come(
    limits: KeyLimits, steps: list[tuple[str, float]]
) -> None:
    history, without = History(limits), History(limits)
    for kind, amount in steps:
        num_before = len(history.entered)
        history.step(kind, amount)
        if kind != "enter" or len(history.entered) > num_before:
            without.step(kind, amount)
    assert num_that_enter(history) == num_that_enter(without)


NAMES = st.sampled_from(["a", "b", "c"])
FILES = st.dictionaries(NAMES, st.builds(KeyLimits, st.one_of(st.none(), st.integers(1, 3))), max_size=3)


@settings(max_examples=drawn(1000), deadline=None)
@given(st.lists(st.one_of(FILES, NAMES, st.integers(0, 9)), max_size=60))
def test_changes_of_the_file_lose_no_slot(steps: list[dict[str, KeyLimits] | str | int]) -> None:
    """A dictionary is a new file, a name begins a request, a number ends one that runs."""
    uses, running = KeyUses({}), list[tuple[str, KeyUse]]()
    limits: dict[str, KeyLimits] = {}
    for step in steps:
        if isinstance(step, dict):
            limits = step
            uses.set_limits(limits)
        elif isinstance(step, str):
            if (use := uses.of(step)) is not None and use.enter(1, now=0.0) is None:
                running.append((step, use))
        elif running:
            running.pop(step % len(running))[1].leave()
        for name, use in uses.all():
            assert use.num_running == sum(name == other for other, _ in running)
        assert {name for name, _ in running} <= {name for name, _ in uses.all()}
        assert limits.keys() <= {name for name, _ in uses.all()}
    for _, use in running:
        use.leave()
    uses.set_limits({})
    assert not list(uses.all())


WAITING_STEPS = st.lists(
    st.one_of(
        st.integers(0, 60).map(lambda tokens: ("enter", float(tokens))),
        st.integers(0, 60).map(lambda tokens: ("queue", float(tokens))),
        st.integers(0, 20).map(lambda index: ("displace", float(index))),
        st.integers(0, 20).map(lambda index: ("use", float(index))),
        st.floats(0, 40).map(lambda seconds: ("wait", seconds)),
    ),
    max_size=80,
)


@settings(max_examples=drawn(1500), deadline=None)
@given(st.builds(KeyLimits, st.none(), MAYBE, st.one_of(st.none(), st.integers(1, 200))), WAITING_STEPS)
def test_what_is_used_stays_within_the_rates_whatever_is_given_back(
    limits: KeyLimits, steps: list[tuple[str, float]]
) -> None:
    """Requests count from when they entered, as those do that do not wait."""
    history, waiting = History(limits), dict[int, tuple[float, int]]()
    for number, (kind, amount) in enumerate(steps):
        if kind in ("displace", "use") and waiting:
            taker = list(waiting)[int(amount) % len(waiting)]
            taken = waiting.pop(taker)
            if kind == "displace":
                history.use.give_back(taker, history.now)
                history.entered.remove(taken)
            else:
                history.use.let_go(taker)
        elif kind == "queue" and history.use.enter(int(amount), now=history.now) is None:
            history.use.hold(number, int(amount))
            waiting[number] = (history.now, int(amount))
            history.entered.append(waiting[number])
        else:
            history.step(kind, amount)
    if limits.requests_per_minute is not None:
        most_in([(at, 1) for at, _ in history.entered], limits.requests_per_minute)
    if limits.prompt_tokens_per_minute is not None:
        most_in(history.entered, limits.prompt_tokens_per_minute)
    assert history.use.enter(1, now=history.now + 2 * WINDOW_S) is None, "a key that rests has all of it again"


@settings(max_examples=drawn(1500), deadline=None)
@given(LIMITS, STEPS, st.lists(st.integers(0, 60), max_size=20), st.floats(0, 40))
def test_requests_displaced_newest_first_leave_as_much_as_if_they_had_not_come(
    limits: KeyLimits, steps: list[tuple[str, float]], displaced: list[int], seconds: float
) -> None:
    history, without = History(replace(limits, max_concurrent=None)), History(replace(limits, max_concurrent=None))
    for kind, amount in steps:
        history.step(kind, amount)
        without.step(kind, amount)
    takers = []
    for number, num_tokens in enumerate(displaced):
        if history.use.enter(num_tokens, now=history.now) is None:
            history.use.hold(number, num_tokens)
            takers.append(number)
    history.step("wait", seconds)
    without.step("wait", seconds)
    for taker in reversed(takers):
        history.use.give_back(taker, history.now)
    rates = [each.use.requests_left(each.now) for each in (history, without)]
    assert [rate and rate.left for rate in rates[:1]] == [rate and rate.left for rate in rates[1:]]
    assert num_that_enter(history) == num_that_enter(without)
