"""Laws of the queue while the file of keys changes: a key has one line, and its weight and priority of now hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from drawn import drawn
from pdcluster_router.core.clients.fair_queue import FairQueue, KeyFlow

TURN_S = 10.0
COSTS = st.lists(st.integers(1, 50), min_size=40, max_size=40)
WEIGHTS = st.integers(1, 5)
NAMES = "abcd"
FILES = st.fixed_dictionaries(
    {name: st.builds(KeyFlow, st.just(name), weight=WEIGHTS, priority=st.sampled_from([-1, 0, 0, 3])) for name in NAMES}
)


class ChangingKeys(RuleBasedStateMachine):
    """The file of keys changes while requests come, leave and are let in: each key has one line, as its key is now."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[tuple[str, int]] = FairQueue(1e9)
        self.flows = {name: KeyFlow(name) for name in NAMES}
        self.lines: dict[str, list[tuple[str, int]]] = {name: [] for name in NAMES}
        self.num_came = 0

    @rule(flows=FILES)
    def the_file_changes(self, flows: dict[str, KeyFlow]) -> None:
        self.flows = flows
        self.queue.set_flows(flows.__getitem__, now=0.0)

    @rule(name=st.sampled_from(NAMES), cost=st.integers(1, 50), flow=st.builds(KeyFlow, st.just(""), weight=WEIGHTS))
    def one_comes_with_its_key_as_it_is_now(self, name: str, cost: int, flow: KeyFlow) -> None:
        """It may know of a change that the queue has not been told of."""
        self.flows = {**self.flows, name: KeyFlow(name, weight=flow.weight, priority=self.flows[name].priority)}
        self.num_came += 1
        self.queue.add((name, self.num_came), self.flows[name], cost, now=0.0)
        self.lines[name].append((name, self.num_came))

    @rule(number=st.integers(1, 5))
    def some_are_let_in(self, number: int) -> None:
        for waiter in list(self.queue.in_order(number, now=0.0)):
            self.queue.let_in(waiter, waiter[0], now=0.0)
            self.lines[waiter[0]].remove(waiter)

    @rule(name=st.sampled_from(NAMES), index=st.integers(0, 9))
    def one_leaves(self, name: str, index: int) -> None:
        if line := self.lines[name]:
            self.queue.remove(line.pop(index % len(line)), name)

    @invariant()
    def each_key_has_one_line(self) -> None:
        order = list(self.queue.in_order(1000, now=0.0))
        for name, line in self.lines.items():
            assert [waiter for waiter in order if waiter[0] == name] == line
        priorities = [self.flows[name].priority for name, _ in order]
        assert priorities == sorted(priorities)
        assert len(order) == sum(map(len, self.lines.values()))

    @invariant()
    def places_are_counted_by_key_and_its_weight_of_now(self) -> None:
        parts = {name: len(line) / self.flows[name].weight for name, line in self.lines.items() if len(line) > 1}
        for name, flow in self.flows.items():
            out = self.queue.displaced_by(flow)
            has_part = (
                bool(self.lines[name]) and max(parts.values(), default=0.0) <= (len(self.lines[name]) + 1) / flow.weight
            )
            assert (out is None) is (not parts or has_part)
            assert out is None or (parts[out[0]] == max(parts.values()) and out == self.lines[out[0]][-1])


def test_each_key_has_one_line_whatever_becomes_of_the_file_of_keys() -> None:
    run_state_machine_as_test(
        ChangingKeys, settings=settings(max_examples=drawn(100), stateful_step_count=30, deadline=None)
    )


@given(
    costs=st.tuples(COSTS, COSTS),
    before=st.tuples(WEIGHTS, WEIGHTS),
    after=st.tuples(WEIGHTS, WEIGHTS),
    num_before=st.integers(0, 20),
)
@settings(max_examples=drawn(300), deadline=None)
def test_what_waits_is_let_in_by_the_new_weights_as_soon_as_they_change(
    costs: tuple[list[int], list[int]], before: tuple[int, int], after: tuple[int, int], num_before: int
) -> None:
    """Up to one request of each key before the change, and one of each after it."""
    queue: FairQueue[tuple[str, int, int]] = FairQueue(TURN_S)
    for name, weight, each in zip("ab", before, costs, strict=True):
        for number, cost in enumerate(each):
            queue.add((name, number, cost), KeyFlow(name, weight=weight), cost, now=0.0)
    left = dict.fromkeys("ab", 40)
    weights = dict(zip("ab", after, strict=True))
    served = dict.fromkeys("ab", 0.0)
    most = sum(
        max(each) / weight for weights_of in (before, after) for each, weight in zip(costs, weights_of, strict=True)
    )
    for number in range(80):
        if number == num_before:
            queue.set_flows(lambda name: KeyFlow(name, weight=weights[name]), now=0.0)
        (first,) = queue.in_order(1, now=0.0)
        queue.let_in(first, first[0], now=0.0)
        left[first[0]] -= 1
        if number >= num_before:
            served[first[0]] += first[2] / weights[first[0]]
        assert abs(served["a"] - served["b"]) <= most + 1e-6
        if not all(left.values()):
            return
