"""Who keeps a last prefill engine, and who does not."""

from __future__ import annotations

from pdcluster_operator.core.rollout.fleet import Fleet, RoleFleet, Workload
from pdcluster_operator.core.rollout.last_prefill import keep_last_prefill
from pdcluster_operator.core.rollout.steps import Change
from pdcluster_protocol.labels import Role


def serving(name: str, replicas: int, ready: int | None = None, terminating: int = 0) -> Workload:
    """The first part of the name is the revision."""
    num_ready = replicas if ready is None else ready
    return Workload(name, name.partition("-")[0], replicas, replicas, num_ready, terminating)


def role(*old: Workload) -> RoleFleet:
    return RoleFleet(Workload("new", "new"), wanted=1, surge=0, unavailable=1, old=old)


def after(fleet: Fleet, **asked: int) -> dict[str, int]:
    """What is left of orders like ``p1=0``; prefill workloads have names with a p."""
    names = {name.replace("_", "-"): replicas for name, replicas in asked.items()}
    orders = tuple(
        Change(which, workload.name, workload.replicas, names[workload.name])
        for which in Role
        for workload in fleet.of(which).workloads
        if workload.name in names
    )
    return {change.workload: change.after for change in keep_last_prefill(fleet, orders)}


def test_when_both_roles_go_decode_goes_first() -> None:
    fleet = Fleet(role(serving("old-p", 1)), role(serving("old-d", 2)))
    assert after(fleet, old_p=0, old_d=0) == {"old-d": 0}


def test_of_several_prefill_engines_one_stays() -> None:
    fleet = Fleet(role(serving("old-p", 3)), role(serving("old-d", 2)))
    assert after(fleet, old_p=0, old_d=0) == {"old-p": 1, "old-d": 0}


def test_it_stays_while_a_decode_pod_finishes_its_requests() -> None:
    fleet = Fleet(role(serving("old-p", 1)), role(serving("old-d", 0, terminating=1)))
    assert after(fleet, old_p=0) == {}


def test_it_goes_when_no_decode_pod_is_left() -> None:
    fleet = Fleet(role(serving("old-p", 1)), role(serving("old-d", 0)))
    assert after(fleet, old_p=0) == {"old-p": 0}


def test_one_that_is_not_ready_helps_nobody() -> None:
    fleet = Fleet(role(serving("old-p", 1, ready=0)), role(serving("old-d", 1)))
    assert after(fleet, old_p=0, old_d=0) == {"old-p": 0, "old-d": 0}


def test_of_several_templates_the_one_with_most_ready_keeps_it() -> None:
    fleet = Fleet(role(serving("old-p1", 2, ready=1), serving("old-p2", 2)), role(serving("old-d", 1)))
    assert after(fleet, old_p1=0, old_p2=0, old_d=0) == {"old-p1": 0, "old-p2": 1, "old-d": 0}


def test_another_template_that_stays_is_enough() -> None:
    fleet = Fleet(role(serving("old-p1", 1), serving("old-p2", 1)), role(serving("old-d", 1)))
    assert after(fleet, old_p1=0, old_d=0) == {"old-p1": 0, "old-d": 0}


def test_each_revision_keeps_its_own() -> None:
    fleet = Fleet(role(serving("a-p", 1), serving("b-p", 1)), role(serving("a-d", 1)))
    assert after(fleet, a_p=0, b_p=0, a_d=0) == {"b-p": 0, "a-d": 0}  # b has no decode engines to outlive


def test_a_pool_that_stops_keeps_one_as_well() -> None:
    prefill = RoleFleet(serving("now-p", 2), wanted=0, surge=0, unavailable=1)
    decode = RoleFleet(serving("now-d", 2), wanted=0, surge=0, unavailable=1)
    assert after(Fleet(prefill, decode), now_p=0, now_d=0) == {"now-p": 1, "now-d": 0}


def test_orders_that_leave_some_are_not_touched() -> None:
    fleet = Fleet(role(serving("old-p", 3)), role(serving("old-d", 2)))
    assert after(fleet, old_p=1, old_d=1) == {"old-p": 1, "old-d": 1}


def test_where_decode_stays_only_a_template_is_replaced_and_nothing_is_kept() -> None:
    prefill = RoleFleet(Workload("now-p2", "now"), wanted=1, surge=0, unavailable=1, old=(serving("now-p1", 1),))
    decode = RoleFleet(serving("now-d", 1), wanted=1, surge=0, unavailable=1)
    assert after(Fleet(prefill, decode), now_p1=0) == {"now-p1": 0}


def test_of_groups_it_keeps_as_many_as_hold_a_ready_one() -> None:
    """A LeaderWorkerSet gives up its last groups: with one replica only one that is not ready would stay."""
    groups = Workload("old-p", "old", 4, 4, 2, 0, (1, 3))
    fleet = Fleet(role(groups), role(serving("old-d", 1)))
    assert after(fleet, old_p=0, old_d=0) == {"old-p": 2, "old-d": 0}
