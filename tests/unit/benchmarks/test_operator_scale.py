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


def faults(writes: int = 0, touched: int = 0, missed: int = 0, short: int = 0) -> list[str]:
    """The operator's calls at rest renew its Lease; beside these, what the arguments say."""
    counts = Counts(Counter({Call("patch", "services", 200): writes, Call("update", "leases", 200): 30}))
    found = Report(PLAN, Bare(1, 1.0, 1.0), Snapshot(0.0, {}, Counts(), 0), num_touched=touched, num_missed=missed)
    found.phases["at rest"] = Phase("at rest", 60.0, {}, counts, 0)
    found.lags = [Lag(0.01, 0.02)] * (PLAN.num_changes - missed - short)
    return found.faults()


def shown(version: int, ready: str = "False", generation: int = 1) -> Object:
    metadata = {"name": "one", "resourceVersion": str(version)}
    condition = {"type": "Ready", "status": ready}
    return {"metadata": metadata, "status": {"observedGeneration": generation, "conditions": [condition]}}


def test_a_plan_changes_each_engine_at_its_pace_and_what_must_not_be_is_a_fault_each() -> None:
    assert PLAN.num_changes == 5000
    assert Plan(clusters=1, seconds=1.0, pace=19.0).num_changes == 4  # Whoever goes comes back.
    assert faults() == []
    assert faults(writes=1, touched=2, missed=3, short=4) == [
        "1 writes at rest",
        "2 objects changed at rest",
        "3 changes never got into a status",
        "4 of 5000 planned changes never happened",
    ]


def test_the_bare_loop_makes_every_child_of_a_new_pdcluster_and_three_deployments() -> None:
    made = Counter(child.kind for child in first_children(pool_document("one", 80)))
    assert (made["Deployment"], made["Secret"], made.total()) == (3, 1, 18)


def test_only_names_of_services_are_this_machine() -> None:
    resolve = resolver(4321)
    asked = [("pool-router.pools.svc", 8000), ("pool-router-internal.pools.svc", 8001), ("192.0.2.1", 80)]
    assert [resolve(*one)[0][4] for one in asked] == [("127.0.0.1", 8000), ("127.0.0.1", 4321), ("192.0.2.1", 80)]


def test_who_waits_for_an_object_knows_when_it_is_ready_for_its_spec_and_not_before() -> None:
    async def wait() -> None:
        board = Board()
        board.expect_next("one").cancel()
        ready, moved = board.expect("one", lambda one: is_ready(one, 2)), board.expect("one", lambda one: True)
        board.show(shown(1))
        next_one = board.expect_next("one")
        board.show(shown(1, "True", 1))
        assert (ready.done(), moved.done(), next_one.done()) == (False, True, False)
        board.show(shown(2, "False", 2))
        assert (ready.done(), next_one.done()) == (False, True)
        board.show(shown(3, "True", 2))
        assert ready.done()
        assert board.expect("one", lambda one: is_ready(one, 2)).done()
        assert not board.expect_next("other").done()

    asyncio.run(wait())
