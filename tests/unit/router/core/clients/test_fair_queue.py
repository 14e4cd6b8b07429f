"""The queue's order, by known answers: turns of keys, weights, priorities, and whose place is given away."""

from __future__ import annotations

import pytest

from pdcluster_router.core.clients import fair_queue
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.clients.fair_queue import FairQueue, KeyFlow

A, B = KeyFlow("a"), KeyFlow("b")
HEAVY = KeyFlow("b", weight=3)
GREAT = KeyFlow("great", weight=100)
EARLY, LATE = KeyFlow("early", priority=-1), KeyFlow("late", priority=1)


def queue_of(*waiting: tuple[KeyFlow, int, int]) -> FairQueue[str]:
    """A queue to which came, of each flow, so many requests of so many tokens."""
    queue: FairQueue[str] = FairQueue(turn_s=10.0)
    for flow, number, cost in waiting:
        for index in range(1, number + 1):
            queue.add(f"{flow.name}{index}", flow, cost, now=0.0)
    return queue


def order_of(queue: FairQueue[str], most: int = 100, now: float = 0.0) -> str:
    return " ".join(queue.in_order(most, now=now))


def let_in(queue: FairQueue[str], flow: KeyFlow, *waiters: str, now: float = 0.0) -> None:
    for waiter in waiters:
        queue.let_in(waiter, flow.name, now=now)


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ([(A, 3, 10)], "a1 a2 a3"),
        ([(A, 5, 10), (B, 2, 10)], "a1 b1 a2 b2 a3 a4 a5"),
        ([(A, 6, 10), (B, 2, 30)], "a1 b1 a2 a3 a4 b2 a5 a6"),
        ([(A, 3, 10), (HEAVY, 5, 10)], "a1 b1 b2 b3 a2 b4 b5 a3"),
        ([(LATE, 2, 1), (A, 2, 100), (EARLY, 2, 100)], "early1 early2 a1 a2 late1 late2"),
    ],
    ids=["one flow", "two", "by tokens", "by weight", "by priority"],
)
def test_keys_take_turns_by_tokens_and_weight_within_a_priority(
    waiting: list[tuple[KeyFlow, int, int]], order: str
) -> None:
    assert order_of(queue_of(*waiting)) == order


def test_the_order_stays_the_same_when_one_after_the_other_is_let_in() -> None:
    queue = queue_of((A, 6, 10), (HEAVY, 4, 20))
    order, entered = order_of(queue).split(), []
    while first := order_of(queue, most=1):
        let_in(queue, A if first[0] == "a" else HEAVY, first)
        entered.append(first)
    assert entered == order


def test_a_key_that_comes_late_gets_nothing_for_the_time_before() -> None:
    queue = queue_of((A, 9, 10))
    let_in(queue, A, "a1", "a2", "a3", "a4")
    for waiter in ("b1", "b2", "b3"):
        queue.add(waiter, B, 10, now=0.0)
    assert order_of(queue, most=6) == "a5 b1 a6 b2 a7 b3"


def test_a_key_with_one_large_request_at_a_time_waits_until_others_had_as_much() -> None:
    queue = queue_of((A, 9, 10), (B, 1, 30))
    let_in(queue, A, "a1")
    let_in(queue, B, "b1")
    queue.add("b2", B, 30, now=0.0)
    assert order_of(queue, most=4) == "a2 a3 a4 b2", "it owes 30"


def test_what_a_key_has_had_is_forgotten_once_none_of_its_priority_waits() -> None:
    queue = queue_of((A, 2, 10), (B, 1, 90), (LATE, 1, 1))
    let_in(queue, B, "b1")
    let_in(queue, A, "a1", "a2")
    queue.add("b2", B, 10, now=0.0)
    queue.add("a3", A, 10, now=0.0)
    assert order_of(queue) == "b2 a3 late1"


def test_a_request_that_leaves_is_not_charged_and_one_that_is_let_in_out_of_turn_is() -> None:
    queue = queue_of((A, 5, 10), (B, 3, 10))
    queue.remove("a1", "a")
    queue.remove("a2", "a")
    assert order_of(queue) == "a3 b1 a4 b2 a5 b3"
    let_in(queue, A, "a4")
    assert order_of(queue) == "b1 a3 b2 a5 b3"


def test_a_priority_that_waits_has_a_turn_of_one_request_and_then_waits_again() -> None:
    queue = queue_of((LATE, 3, 10), (A, 4, 10))
    let_in(queue, A, "a1", now=5.0)
    assert order_of(queue, most=2, now=9.9) == "a2 a3"
    assert order_of(queue, now=10.0) == "late1 a2 a3 a4 late2 late3"
    let_in(queue, LATE, "late1", now=10.0)
    assert order_of(queue, most=1, now=19.9) == "a2"
    assert order_of(queue, most=2, now=20.0) == "a2 late2", "of two that have waited, the earlier priority is first"


def test_a_priority_that_has_waited_has_one_turn_and_not_one_for_each_of_its_keys() -> None:
    queue = queue_of((LATE, 1, 10), (KeyFlow("other", priority=1), 1, 10), (A, 3, 10))
    let_in(queue, A, "a1", now=5.0)
    assert order_of(queue, now=10.0) == "late1 a2 a3 other1"


def test_a_priority_waits_for_its_turn_from_when_its_first_request_came() -> None:
    queue = queue_of((A, 3, 10))
    queue.add("late1", LATE, 10, now=50.0)
    let_in(queue, A, "a1", now=55.0)
    assert order_of(queue, most=1, now=59.9) == "a2"
    assert order_of(queue, most=1, now=60.0) == "late1"


@pytest.mark.parametrize(
    ("waiting", "flow", "out"),
    [
        ([(A, 3, 10)], A, None),
        ([(A, 3, 10)], B, "a3"),
        ([(A, 2, 10), (B, 1, 10)], B, None),
        ([(A, 3, 10), (B, 1, 10)], B, "a3"),
        ([(A, 2, 10), (HEAVY, 4, 10)], A, None),
        ([(A, 2, 10), (HEAVY, 4, 10)], HEAVY, "a2"),
        ([(EARLY, 3, 10), (LATE, 1, 10)], LATE, "early3"),
        ([(LATE, 1, 10)], EARLY, None),
        ([(GREAT, 3, 10)], A, "great3"),
        ([(GREAT, 3, 10), (A, 1, 10)], A, None),
        ([(GREAT, 3, 10), (A, 1, 10)], GREAT, None),
        ([(GREAT, 3, 10), (A, 1, 10)], B, "great3"),
        ([(GREAT, 1, 10), (A, 1, 10)], B, None),
        ([(A, 1, 10)], GREAT, None),
        ([], A, None),
    ],
)
def test_a_full_queue_has_places_for_all_keys_by_weight(
    waiting: list[tuple[KeyFlow, int, int]], flow: KeyFlow, out: str | None
) -> None:
    assert queue_of(*waiting).displaced_by(flow) == out


def test_a_small_request_of_another_key_passes_a_large_one_for_a_while() -> None:
    gate: Admission[str] = Admission(engine_tokens=100, max_queued=9, queue_s=40.0)
    assert gate.enter(100)
    gate.queue("large", 60, now=0.0, deadline=90.0, flow=A)
    gate.queue("small", 10, now=0.0, deadline=90.0, flow=LATE)
    gate.queue("smaller", 5, now=0.0, deadline=90.0, flow=B)
    gate.give_back(50)
    assert gate.admit(now=1.9) == ["smaller", "small"]
    gate.queue("late", 5, now=1.9, deadline=90.0, flow=B)
    assert gate.admit(now=2.0) == []
    gate.give_back(25)
    assert gate.admit(now=2.0) == ["large"]


def test_a_key_whose_requests_fill_the_queue_gives_a_place_to_another_key() -> None:
    gate: Admission[str] = Admission(engine_tokens=100, max_queued=3, queue_s=40.0)
    assert gate.enter(100)
    for number in range(3):
        assert gate.queue(f"a{number}", 10, now=0.0, deadline=90.0, flow=A) is not None
    assert gate.queue("b", 10, now=1.0, deadline=90.0, flow=B) is None
    assert gate.displace_for(B) == "a2"
    assert gate.queue("b", 10, now=1.0, deadline=90.0, flow=B) is not None
    assert gate.waiters == ["a0", "a1", "b"]
    gate.give_back(100)
    assert gate.admit(now=1.0) == ["a0", "b", "a1"]


def changed(queue: FairQueue[str], *flows: KeyFlow, now: float = 0.0) -> None:
    """The file of keys has been read anew."""
    by_name = {flow.name: flow for flow in flows}
    queue.set_flows(lambda name: by_name.get(name) or KeyFlow(name), now=now)


def test_a_changed_weight_holds_for_requests_that_wait() -> None:
    queue = queue_of((A, 6, 10), (B, 6, 10))
    let_in(queue, A, "a1")
    let_in(queue, B, "b1")
    changed(queue, A, HEAVY)
    assert order_of(queue) == "a2 b2 b3 b4 a3 b5 b6 a4 a5 a6"


def test_a_request_that_comes_with_another_weight_gives_it_to_those_before_it() -> None:
    queue = queue_of((A, 3, 10), (B, 3, 10))
    queue.add("b4", HEAVY, 10, now=0.0)
    assert order_of(queue) == "a1 b1 b2 b3 a2 b4 a3"


def test_a_key_has_no_more_places_for_having_changed_and_its_new_weight_counts() -> None:
    queue = queue_of((A, 2, 10), (B, 2, 10))
    changed(queue, HEAVY)
    queue.add("b3", HEAVY, 10, now=0.0)
    assert [queue.displaced_by(flow) for flow in (A, HEAVY)] == [None, "a2"]
    changed(queue)
    assert [queue.displaced_by(flow) for flow in (A, B)] == [None, None]
    queue.add("b4", B, 10, now=0.0)
    assert [queue.displaced_by(flow) for flow in (A, B)] == ["b4", None]


def test_a_changed_priority_moves_the_whole_line_which_begins_anew_there() -> None:
    queue = queue_of((A, 3, 10), (LATE, 2, 10), (B, 2, 10))
    let_in(queue, A, "a1")
    early = KeyFlow("late", priority=0)
    changed(queue, early)
    assert order_of(queue) == "late1 b1 a2 late2 b2 a3"
    changed(queue, KeyFlow("a", priority=1), KeyFlow("b", priority=1), early)
    assert order_of(queue) == "late1 late2 a2 b1 a3 b2"
    changed(queue, KeyFlow("a", priority=1), KeyFlow("b", priority=1), LATE, now=3.0)
    assert order_of(queue).split()[:3] == ["a2", "late1", "b1"]
    for name in ("a", "b", "late"):
        for waiter in [one for one in order_of(queue).split() if one[:-1] == name]:
            queue.remove(waiter, name)
    assert order_of(queue) == ""


def test_a_priority_that_comes_by_a_change_waits_for_its_turn_from_then() -> None:
    queue = queue_of((A, 3, 10), (B, 1, 10))
    changed(queue, KeyFlow("b", priority=3), now=50.0)
    let_in(queue, A, "a1", now=55.0)
    assert order_of(queue, most=1, now=59.9) == "a2"
    assert order_of(queue, most=1, now=60.0) == "b1"


def test_a_debt_is_kept_while_the_weight_changes() -> None:
    queue = queue_of((A, 9, 10), (B, 1, 30))
    let_in(queue, A, "a1")
    let_in(queue, B, "b1")
    changed(queue, HEAVY)
    queue.add("b2", HEAVY, 30, now=0.0)
    assert order_of(queue, most=4) == "a2 a3 a4 b2"


def test_keys_that_come_and_go_with_each_file_leave_no_debts_behind() -> None:
    queue = queue_of((KeyFlow("stays"), 1, 2))
    for number in range(50):
        name = f"key-{number}"
        queue.add(name, KeyFlow(name), 1, now=0.0)
        queue.let_in(name, name, now=0.0)
        queue.let_in(order_of(queue, 1), "stays", now=0.0)
        queue.add(f"more-{number}", KeyFlow("stays"), 1, now=0.0)
        queue.set_flows(KeyFlow, now=0.0)
    assert len(queue._classes[0].debts) < 3


def test_the_tags_of_clients_that_left_are_bounded_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_DEBTS", 2)
    queue = queue_of((A, 1, 10), (B, 1, 10))
    for number in range(4):
        flow = KeyFlow(f"jwt:{number}")
        queue.add(flow.name, flow, 100, now=0.0)
        let_in(queue, flow, flow.name)
    for number in range(4):
        queue.add(f"again{number}", KeyFlow(f"jwt:{number}"), 100, now=0.0)
    assert [queue._lines[f"jwt:{number}"].tag for number in range(4)] == [0.0, 0.0, 100.0, 100.0]
