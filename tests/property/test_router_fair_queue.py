"""Laws of the queue before admission: keys take turns by tokens, no priority starves, one flow is as it was before."""

from __future__ import annotations

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from drawn import drawn
from pdcluster_router.core.clients.admission import MAX_LOOKED_AT, PASS_S, Admission
from pdcluster_router.core.clients.fair_queue import FairQueue, KeyFlow

LIMIT = 100
WORK_S = 1.0
"""How long the slowest prefill takes."""
QUEUE_S = 40.0
TURN_S = QUEUE_S / 4
FLOWS = [
    KeyFlow("a"),
    KeyFlow("b", weight=3),
    KeyFlow("c", weight=2),
    KeyFlow("d", priority=-1),
    KeyFlow("e", priority=7),
    KeyFlow("f", weight=100),
]


class ArrivalOrder:
    """How admission chose before there were flows: the differential test's other side."""

    def __init__(self) -> None:
        self.backlog, self.limit = 0, LIMIT
        self.queue: dict[int, tuple[int, float]] = {}

    def has_room(self, share: int) -> bool:
        return self.backlog <= 0 or self.backlog + share <= self.limit

    def enter(self, share: int) -> bool:
        if self.queue or not self.has_room(share):
            return False
        self.backlog += share
        return True

    def admit(self, now: float) -> list[int]:
        entered = []
        for waiter, (share, queued_at) in islice(self.queue.items(), MAX_LOOKED_AT):
            if self.has_room(share):
                self.backlog += share
                entered.append(waiter)
            elif now >= queued_at + PASS_S or self.backlog >= self.limit:
                break
        for waiter in entered:
            del self.queue[waiter]
        return entered


class OneFlow(RuleBasedStateMachine):
    """Requests of one flow come, leave and end, at any time; both orders are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.gate: Admission[int] = Admission(engine_tokens=LIMIT, max_queued=1000, queue_s=1000.0)
        self.before = ArrivalOrder()
        self.running: list[int] = []
        self.num_came = 0

    @initialize(flow=st.sampled_from(FLOWS))
    def all_are_of(self, flow: KeyFlow) -> None:
        self.flow = flow

    @rule(shares=st.lists(st.integers(1, 60), min_size=1, max_size=80))
    def requests_come(self, shares: list[int]) -> None:
        for share in shares:
            self.num_came += 1
            enters = self.gate.enter(share)
            assert enters is self.before.enter(share)
            if enters:
                self.running.append(share)
                continue
            self.gate.queue(self.num_came, share, now=self.now, deadline=1e9, flow=self.flow)
            self.before.queue[self.num_came] = (share, self.now)

    @rule(index=st.integers(0, 200))
    def one_leaves_the_queue(self, index: int) -> None:
        if self.before.queue:
            waiter = list(self.before.queue)[index % len(self.before.queue)]
            del self.before.queue[waiter]
            self.gate.leave(waiter)

    @rule(number=st.integers(1, 5))
    def some_end(self, number: int) -> None:
        for _ in range(min(number, len(self.running))):
            share = self.running.pop(0)
            self.gate.give_back(share)
            self.before.backlog -= share

    @rule(num_usable=st.integers(0, 4))
    def engines_change(self, num_usable: int) -> None:
        self.gate.set_engines(num_usable)
        self.before.limit = max(1, num_usable) * LIMIT

    @rule(seconds=st.sampled_from([0.0, 0.7, 2.0]))
    def the_queue_is_looked_at(self, seconds: float) -> None:
        self.now += seconds
        shares = {waiter: share for waiter, (share, _) in self.before.queue.items()}
        entered = self.gate.admit(now=self.now)
        assert entered == self.before.admit(self.now)
        self.running += [shares[waiter] for waiter in entered]
        assert self.gate.waiters == list(self.before.queue)
        assert self.gate.backlog_tokens == self.before.backlog


def test_with_one_flow_requests_enter_as_they_did_before_there_were_flows() -> None:
    run_state_machine_as_test(OneFlow, settings=settings(max_examples=drawn(150), deadline=None))


class ManyFlows(RuleBasedStateMachine):
    """Requests of all flows come, leave the queue and end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.gate: Admission[int] = Admission(engine_tokens=LIMIT, max_queued=30, queue_s=QUEUE_S)
        self.flow_of: dict[int, KeyFlow] = {}
        self.shares: dict[int, int] = {}
        self.came_at: dict[int, float] = {}
        self.order: list[int] = []
        self.running: dict[int, float] = {}
        self.had_turn_at: dict[int, float] = {}

    @rule(flow=st.sampled_from(FLOWS), share=st.integers(1, 25), number=st.integers(1, 12))
    def requests_come(self, flow: KeyFlow, share: int, number: int) -> None:
        for _ in range(number):
            guest = len(self.flow_of) + 1
            self.flow_of[guest], self.shares[guest], self.came_at[guest] = flow, share, self.now
            if self.gate.enter(share):
                self.running[guest] = self.now + WORK_S
            else:
                self.queue(guest, flow)
        self.admit()

    def queue(self, guest: int, flow: KeyFlow) -> None:
        if self.gate.queue(guest, self.shares[guest], now=self.now, deadline=1e9, flow=flow) is None:
            counts = {each: self.num_of(each) / each.weight for each in FLOWS if self.num_of(each) > 1}
            most, num_own = max(counts.values(), default=0.0), self.num_of(flow)
            out = self.gate.displace_for(flow)
            if out is None:
                assert num_own or not counts, "each has one before another has two"
                assert most <= (num_own + 1) / flow.weight, "its part of the places"
                return
            assert counts[self.flow_of[out]] == most
            assert not num_own or most > (num_own + 1) / flow.weight
            assert out == [one for one in self.order if self.flow_of[one] is self.flow_of[out]][-1], "the newest"
            self.left(out)
            assert self.gate.queue(guest, self.shares[guest], now=self.now, deadline=1e9, flow=flow) is not None
        if not self.num_of_priority(flow.priority):
            self.had_turn_at[flow.priority] = self.now
        self.order.append(guest)

    def num_of(self, flow: KeyFlow) -> int:
        return sum(self.flow_of[one] is flow for one in self.order)

    def num_of_priority(self, priority: int) -> int:
        return sum(self.flow_of[one].priority == priority for one in self.order)

    def left(self, guest: int) -> None:
        self.order.remove(guest)

    @rule(index=st.integers(0, 30))
    def one_leaves_the_queue(self, index: int) -> None:
        if self.order:
            guest = self.order[index % len(self.order)]
            self.gate.leave(guest)
            self.left(guest)
            self.admit()

    @rule(seconds=st.sampled_from([0.2, 0.5, 1.0]), times=st.sampled_from([1, 5, 30]))
    def time_passes(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.now += seconds
            for guest in self.gate.expire(now=self.now):
                assert self.now >= self.came_at[guest] + QUEUE_S
                self.left(guest)
            for guest in [guest for guest, ends_at in self.running.items() if ends_at <= self.now]:
                del self.running[guest]
                self.gate.give_back(self.shares[guest])
            self.admit()
            self.holds()

    @rule(priority=st.sampled_from([-1, 0]))
    def one_priority_floods_the_pool(self, priority: int) -> None:
        flow = next(each for each in FLOWS if each.priority == priority)
        for _ in range(30):
            if self.gate.num_queued < 30:
                self.requests_come(flow, 25, 8)
            self.time_passes(0.5, 1)

    def admit(self) -> None:
        starved = {one for one, at in self.had_turn_at.items() if self.num_of_priority(one) and self.now >= at + TURN_S}
        entered = self.gate.admit(now=self.now)
        assert len(set(entered)) == len(entered)
        for guest in entered:
            flow = self.flow_of[guest]
            own = [one for one in self.order[: self.order.index(guest)] if self.flow_of[one] is flow]
            assert all(self.now < self.came_at[one] + PASS_S for one in own), "passed for too long by its own flow"
            self.order.remove(guest)
            self.running[guest] = self.now + WORK_S
            self.had_turn_at[flow.priority] = self.now
        self.earlier_priorities_go_first(entered, starved)

    def earlier_priorities_go_first(self, entered: list[int], starved: set[int]) -> None:
        """Who still waits had no room, not even without those of later priorities whose turn it was not."""
        for waiter in self.order:
            later = [one for one in entered if self.flow_of[one].priority > self.flow_of[waiter].priority]
            turns = [next((one for one in later if self.flow_of[one].priority == each), None) for each in starved]
            taken = sum(self.shares[one] for one in later if one not in turns)
            backlog = self.gate.backlog_tokens - taken
            assert self.is_held_up() or (backlog > 0 and backlog + self.shares[waiter] > LIMIT)

    def is_held_up(self) -> bool:
        """Whether one that waits may be passed no longer, and has no room."""
        backlog = self.gate.backlog_tokens
        return any(
            self.now >= self.came_at[one] + PASS_S and backlog > 0 and backlog + self.shares[one] > LIMIT
            for one in self.order
        )

    @invariant()
    def holds(self) -> None:
        assert self.gate.backlog_tokens == sum(self.shares[guest] for guest in self.running) <= LIMIT
        assert sorted(self.gate.waiters) == sorted(self.order), "none is lost"
        if self.order:
            assert self.running, "no engine idles while one waits"
        backlog = self.gate.backlog_tokens
        assert self.is_held_up() or all(backlog + self.shares[one] > LIMIT for one in self.order), "and it fits"
        for priority, at in self.had_turn_at.items():
            if self.num_of_priority(priority):
                assert self.now <= at + TURN_S + PASS_S + 4 * WORK_S, "starved"


def test_no_request_is_lost_no_engine_idles_and_no_priority_starves() -> None:
    run_state_machine_as_test(
        ManyFlows, settings=settings(max_examples=drawn(150), stateful_step_count=30, deadline=None)
    )


COSTS = st.lists(st.integers(1, 50), min_size=40, max_size=40)
WEIGHTS = st.integers(1, 5)


@given(costs=st.tuples(COSTS, COSTS), weights=st.tuples(WEIGHTS, WEIGHTS), others=st.lists(st.integers(0, 3)))
@settings(max_examples=drawn(300), deadline=None)
def test_two_flows_that_wait_are_let_in_for_equal_tokens_by_weight_up_to_one_request_of_each(
    costs: tuple[list[int], list[int]], weights: tuple[int, int], others: list[int]
) -> None:
    queue: FairQueue[tuple[KeyFlow, int, int]] = FairQueue(TURN_S)
    flows = [KeyFlow("a", weight=weights[0]), KeyFlow("b", weight=weights[1])]
    for flow, each in zip(flows, costs, strict=True):
        for number, cost in enumerate(each):
            queue.add((flow, number, cost), flow, cost, now=0.0)
    served, left = dict.fromkeys(flows, 0.0), dict.fromkeys(flows, 40)
    most = max(costs[0]) / weights[0] + max(costs[1]) / weights[1]
    third = KeyFlow("c")
    for number in range(1000):
        what = others[number] if number < len(others) else 3
        if what == 1:
            queue.add((third, number, 30), third, 30, now=0.0)
        elif what == 2 and left[flows[0]] > 1:  # One that leaves is not charged.
            leaver = [one for one in queue.in_order(100, now=0.0) if one[0] is flows[0]][-1]
            queue.remove(leaver, "a")
            left[flows[0]] -= 1
        ((flow, _, cost),) = first = list(queue.in_order(1, now=0.0))
        queue.let_in(first[0], flow.name, now=0.0)
        if flow is third:
            continue
        served[flow] += cost / flow.weight
        left[flow] -= 1
        assert abs(served[flows[0]] - served[flows[1]]) <= most + 1e-6
        if not all(left.values()):
            return


@given(
    waiting=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), min_size=1, max_size=60),
    num_before=st.integers(0, 60),
)
@settings(max_examples=drawn(300), deadline=None)
def test_a_key_that_comes_waits_for_one_request_of_each_other_key(
    waiting: list[tuple[str, int]], num_before: int
) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(TURN_S)
    for number, (name, cost) in enumerate(waiting):
        queue.add((name, number), KeyFlow(name), cost, now=0.0)
    for _ in range(min(num_before, len(waiting) - 1)):
        (first,) = queue.in_order(1, now=0.0)
        queue.let_in(first, first[0], now=0.0)
    queue.add(("new", 0), KeyFlow("new"), 50, now=0.0)
    before = []
    for waiter in queue.in_order(100, now=0.0):
        if waiter[0] == "new":
            break
        before.append(waiter[0])
    assert len(before) == len(set(before))
