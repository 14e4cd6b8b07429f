"""Tells why a rollout waits that would go on if its old workloads were Deployments.

A LeaderWorkerSet gives up its last groups, ready or not. If an earlier group is not ready, to lower the set by one
takes a ready instance away, which the floor may forbid. The planner keeps the floor and waits: the group may get ready,
and a user may allow one instance less.
"""

from __future__ import annotations

from dataclasses import replace

from pdcluster_operator.core.rollout.fleet import Fleet, RoleFleet, Workload
from pdcluster_operator.core.rollout.steps import next_step


def held_by_order(fleet: Fleet) -> str:
    """What stands in the way, and the cure, for people; empty: the order of groups stops no step."""
    old = [workload for workload in (*fleet.prefill.old, *fleet.decode.old) if _has_gap(workload)]
    if not old or next_step(fleet):
        return ""
    step = next_step(replace(fleet, prefill=_unordered(fleet.prefill), decode=_unordered(fleet.decode)))
    asked = {change.workload for change in step.changes} if step else set()
    return "; ".join(_told(workload) for workload in old if workload.name in asked)


def _unordered(role: RoleFleet) -> RoleFleet:
    """As if unready instances went first."""
    target, *old = (replace(workload, ready_groups=None) for workload in role.workloads)
    return replace(role, target=target, old=tuple(old))


def _has_gap(workload: Workload) -> bool:
    """Whether a group that is not ready has a ready one after it."""
    return workload.ready_groups is not None and _first_unready(workload) < max(workload.ready_groups, default=0)


def _first_unready(workload: Workload) -> int:
    ready = workload.ready_groups or ()
    return next(group for group in range(len(ready) + 1) if group not in ready)


def _told(workload: Workload) -> str:
    return (
        f"group {_first_unready(workload)} of {workload.name} is not ready, and a LeaderWorkerSet gives up its last "
        "group first, which is needed: mend the group, or allow one instance less by rollout.maxUnavailable"
    )
