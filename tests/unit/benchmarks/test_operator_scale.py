"""What ``operator_scale`` plans, calls a fault, and has made by whom. Nothing runs."""

from __future__ import annotations

import asyncio
from collections import Counter

from benchmarks.kube_user import Board, Object
from benchmarks.operator_bench import is_ready, pool_document
from benchmarks.operator_figures import Bare, Call, Counts, Lag, Phase, Snapshot
from benchmarks.operator_scale import Plan, Report, first_children
from benchmarks.service_names import resolver

PLAN = Plan(clusters=500, seconds=60.0)


def report(writes: int = 0, touched: int = 0, missed: int = 0, short: int = 0) -> Report:
    counts = Counts(Counter({Call("patch", "services", 200): writes, Call("update", "leases", 200): 30}))
    found = Report(PLAN, Bare(1, 1.0, 1.0), Snapshot(0.0, {}, Counts(), 0), num_touched=touched, num_missed=missed)
    found.phases["at rest"] = Phase("at rest", 60.0, {}, counts, 0)
    found.lags = [Lag(0.01, 0.02)] * (PLAN.num_changes - missed - short)
    return found


def shown(version: int, ready: str = "False", generation: int = 1) -> Object:
    metadata = {"name": "one", "resourceVersion": str(version)}
    condition = {"type": "Ready", "status": ready}
    return {"metadata": metadata, "status": {"observedGeneration": generation, "conditions": [condition]}}


def test_a_full_plan_changes_each_of_5000_engines_once_a_minute() -> None:
    assert PLAN.num_changes == 5000
    assert Plan(clusters=500, seconds=30.0).num_changes == 2500
    assert Plan(clusters=1, seconds=1.0, pace=19.0).num_changes == 4  # Whoever goes comes back.
    assert Plan(clusters=500, seconds=45.0, pace=0.4).flags == "--clusters 500 --seconds 45 --pace 0.4"
    assert Plan(clusters=2, seconds=1.0).names == ["pool-000", "pool-001"]


def test_the_lease_is_no_fault_at_rest() -> None:
    assert report().faults() == []


def test_what_must_not_be_is_a_fault_each() -> None:
    assert report(writes=1, touched=2, missed=3, short=4).faults() == [
        "1 writes at rest",
        "2 objects changed at rest",
        "3 changes never got into a status",
        "4 of 5000 planned changes never happened",
    ]


def test_the_bare_loop_makes_every_child_of_a_new_pdcluster_and_three_deployments() -> None:
    made = Counter(child.kind for child in first_children(pool_document("one", 80)))
    assert made["Deployment"] == 3
    assert made["Secret"] == 1
    assert made.total() == 18


def test_a_pdcluster_is_ready_only_for_what_its_spec_says_now() -> None:
    assert is_ready(shown(1, "True"), 1)
    assert not is_ready(shown(1, "False"), 1)
    assert not is_ready(shown(1, "True"), 2)
    assert not is_ready({"metadata": {}}, 1)


def test_only_names_of_services_are_this_machine() -> None:
    resolve = resolver(4321)
    assert resolve("pool-router.pools.svc", 8000)[0][4] == ("127.0.0.1", 8000)
    assert resolve("pool-router-internal.pools.svc", 8001)[0][4] == ("127.0.0.1", 4321)
    assert resolve("192.0.2.1", 80)[0][4] == ("192.0.2.1", 80)


def test_who_waits_for_an_object_knows_when_it_is_shown_so_and_not_before() -> None:
    async def wait() -> None:
        board = Board()
        ready, moved = board.expect("one", lambda one: is_ready(one, 1)), board.expect("one", lambda one: True)
        board.show(shown(1))
        assert (ready.done(), moved.done()) == (False, True)
        next_one = board.expect_next("one")
        board.show(shown(1))
        assert not next_one.done()
        board.show(shown(2, "True"))
        assert ready.done()
        assert next_one.done()
        assert board.expect("one", lambda one: is_ready(one, 1)).done()
        assert board.expect_next("other").done() is False

    asyncio.run(wait())


def test_who_waits_no_more_is_forgotten() -> None:
    async def leave() -> None:
        board = Board()
        board.expect_next("one").cancel()
        board.show(shown(1))
        assert board.expect("one", lambda one: True).done()

    asyncio.run(leave())
