"""What would happen if a spec were applied: its children, and the steps of the rollout (``pdcluster plan``).

Nothing of a cluster is asked: before is a spec that has been carried out in full, or nothing at all. The steps are the
planner's own, if every pod gets ready and every request is answered.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.fleet import ROLES
from pdcluster_operator.core.observed import Observed, Plan, SeenWorkload, Version
from pdcluster_operator.core.plan import plan_pool, pool_of
from pdcluster_operator.core.rollout import Step, preview_steps
from pdcluster_operator.core.target import Target, target_of
from pdcluster_protocol.errors import ConfigError

_IMAGE: Final = "the operator's"


def preview(before: PDCluster | None, after: PDCluster) -> tuple[str, ...]:
    """Lines for people. ``before``: what runs; None: nothing does. LeaderWorkerSets are taken for installed."""
    try:
        observed = _observed_of(before)
        target = target_of(pool_of(after, _IMAGE), observed)
    except ConfigError as error:
        return (f"refused: {error}",)
    plan = plan_pool(after, observed, router_image=_IMAGE, secret_text="", now=0)
    if plan is None:
        return ("nothing: it is being deleted",)
    if plan.facts.refusal:
        return (f"refused: {plan.facts.refusal}",)
    fleet = target.fleet(is_verified=False, is_paused=False, is_past_deadline=False)
    steps = tuple(_step_line(number, step) for number, step in enumerate(preview_steps(fleet), 1))
    return (
        _summary(target, observed),
        *_child_lines(plan, target),
        *(("steps:", *steps) if steps else ()),
        *_end(steps),
    )


def _observed_of(before: PDCluster | None) -> Observed:
    """A cluster in which ``before`` is what runs."""
    if before is None:
        return Observed(has_groups=True)
    target = target_of(pool_of(before, _IMAGE), Observed(has_groups=True))
    seen = []
    for role in ROLES:
        design, wanted = target.designs[role], target.fleets[role].wanted
        ids = (design.name, design.kind, role, design.revision, design.template, Version(""))
        seen.append(SeenWorkload(*ids, replicas=wanted, live=wanted, ready=wanted))
    return Observed(tuple(seen), has_secret=True, has_groups=True)


def _summary(target: Target, observed: Observed) -> str:
    running = {workload.role: workload for workload in observed.workloads}
    if not running:
        return f"target {target.name}: nothing runs yet"
    if any(workload.revision != target.revision for workload in running.values()):
        return f"target {target.name}: another revision, so both roles are replaced"
    replaced = [role.value for role in ROLES if running[role].name != target.designs[role].name]
    if not replaced:
        return f"target {target.name}: no engine is replaced"
    return f"target {target.name}: the same revision, so only {' and '.join(replaced)} is replaced"


def _child_lines(plan: Plan, target: Target) -> tuple[str, ...]:
    standing = [f"  {child.kind} {child.name}" for child in plan.children]
    there = {child.name for child in plan.children}
    later = [f"  {design.kind.value} {design.name}" for design in target.designs.values() if design.name not in there]
    return ("children:", *standing, *later)


def _step_line(number: int, step: Step) -> str:
    moves = (f"{change.workload} {change.before} -> {change.after}" for change in step.changes)
    return f"  {number}. {', '.join(moves)}"


def _end(steps: tuple[str, ...]) -> tuple[str, ...]:
    return () if steps else ("steps: none",)
