"""Tells why a rollout waits that would go on if its old workloads were Deployments.

A LeaderWorkerSet gives up its last groups, ready or not. If an earlier group is not ready, to lower the set by one
takes a ready instance away, which the floor may forbid. The planner keeps the floor and waits: the groups may get
ready, and a user may allow fewer instances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pdcluster_operator.core.rollout.fleet import ROLES, Fleet, RoleFleet, Workload
from pdcluster_operator.core.rollout.steps import Step, next_step


def held_by_groups(fleet: Fleet) -> str:
    """Tells people which groups stand in the way, and the cure; empty: the order of groups stops no step.

    Nothing is told while the target itself is not well: then it is the target that is waited for.
    """
    gaps = {old.name: gap for role in ROLES for old in fleet.of(role).old if (gap := _unready_groups(old))}
    if not gaps or not _is_target_well(fleet) or next_step(fleet):
        return ""
    if not gaps.keys() & _moved_by(next_step(_each(fleet, _unordered))):
        return ""
    for number in range(1, max(fleet.of(role).wanted for role in ROLES) + 1):
        step = next_step(_each(fleet, partial(replace, unavailable=number)))
        if held := gaps.keys() & _moved_by(step):
            return _held_back_words({name: gaps[name] for name in sorted(held)}, number)
    return ""


def _is_target_well(fleet: Fleet) -> bool:
    """Whether the target's instances are ready and proven, or it has no place for its first ones."""
    targets = [fleet.of(role).target for role in ROLES]
    is_ready = all(target.ready >= target.replicas for target in targets)
    return is_ready and (fleet.is_verified or not all(target.replicas for target in targets))


def _unready_groups(workload: Workload) -> tuple[int, ...]:
    """Groups that are not ready and have a ready one after them."""
    ready = workload.ready_groups or ()
    return tuple(group for group in range(max(ready, default=0)) if group not in ready)


def _each(fleet: Fleet, change: Callable[[RoleFleet], RoleFleet]) -> Fleet:
    return replace(fleet, prefill=change(fleet.prefill), decode=change(fleet.decode))


def _unordered(role: RoleFleet) -> RoleFleet:
    """As if unready instances went first."""
    target, *old = (replace(workload, ready_groups=None) for workload in role.workloads)
    return replace(role, target=target, old=tuple(old))


def _moved_by(step: Step | None) -> set[str]:
    return {change.workload for change in step.changes} if step else set()


def _held_back_words(held: dict[str, tuple[int, ...]], unavailable: int) -> str:
    groups = "; ".join(f"group {', '.join(map(str, gap))} of {name} is not ready" for name, gap in held.items())
    return (
        f"{groups}, and a LeaderWorkerSet gives up its last groups first, of which a ready one is needed: mend what is "
        f"not ready, or set rollout.maxUnavailable to {unavailable}"
    )
