"""Laws of admission over any arrivals, ends and passing time: the backlog is bounded, and nobody starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from drawn import drawn
from pdcluster_router.core.clients.admission import PASS_S, Admission

LIMIT = 100
WORK_S = 1.0
"""How long the slowest prefill takes."""


class History(RuleBasedStateMachine):
    """Requests of any size come; each that has entered ends within ``WORK_S``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.gate: Admission[int] = Admission(engine_tokens=LIMIT, max_queued=50, queue_s=1000.0)
        self.came_at: dict[int, float] = {}
        self.limit = self.most = LIMIT
        self.tokens: dict[int, int] = {}
        self.shares: dict[int, int] = {}
        self.running: dict[int, float] = {}
        self.order: list[int] = []
        self.num_came = 0

    @rule(num_tokens=st.sampled_from([1, 5, 20, 1000]), number=st.integers(1, 6))
    def requests_come(self, num_tokens: int, number: int) -> None:
        for _ in range(number):
            self.num_came += 1
            guest, share = self.num_came, self.gate.share_of(num_tokens)
            self.tokens[guest], self.shares[guest] = num_tokens, share
            self.came_at[guest] = self.now
            if self.gate.enter(share):
                self.running[guest] = self.now + WORK_S
            elif self.gate.queue(guest, share, now=self.now, deadline=1e9) is not None:
                self.order.append(guest)
        self.admit()

    @rule(limit=st.sampled_from([40, LIMIT, 400]), max_queued=st.sampled_from([0, 2, 50]))
    def other_limits_are_set(self, limit: int, max_queued: int) -> None:
        self.limit, self.most = limit, max(self.most, limit)
        self.gate.limit(engine_tokens=limit, max_queued=max_queued, queue_s=1000.0, tokens_of=self.tokens.__getitem__)
        self.shares |= {guest: self.gate.share_of(self.tokens[guest]) for guest in self.order}
        self.admit()

    @rule(index=st.integers(0, 50))
    def one_leaves_the_queue(self, index: int) -> None:
        if self.order:
            self.gate.leave(self.order.pop(index % len(self.order)))
            self.admit()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for guest in [guest for guest, ends_at in self.running.items() if ends_at <= self.now]:
            del self.running[guest]
            self.gate.give_back(self.shares[guest])
        self.admit()

    def admit(self) -> None:
        for guest in self.gate.admit(now=self.now):
            passed = self.order[: self.order.index(guest)]
            assert all(self.now < self.came_at[one] + PASS_S for one in passed), "passed for too long"
            self.order.remove(guest)
            self.running[guest] = self.now + WORK_S

    @invariant()
    def holds(self) -> None:
        assert self.gate.backlog_tokens == sum(self.shares[guest] for guest in self.running) <= self.most
        assert self.gate.num_queued == len(self.order)
        if self.order:
            assert self.running, "nobody waits for nothing"
            assert all(self.shares[guest] <= self.limit // 4 for guest in self.order)

    def teardown(self) -> None:
        """Who is the head has room within its time to be passed and one prefill's length, however many come."""
        if not self.order:
            return
        head = self.order[0]
        latest = max(self.now, self.came_at[head] + PASS_S) + 2 * WORK_S
        while head in self.order:
            self.requests_come(1, 6)
            self.time_passes(0.5)
            self.holds()
            assert self.now <= latest
        assert head in self.running


def test_nobody_starves_and_the_backlog_is_bounded() -> None:
    run_state_machine_as_test(
        History, settings=settings(max_examples=drawn(100), stateful_step_count=30, deadline=None)
    )
