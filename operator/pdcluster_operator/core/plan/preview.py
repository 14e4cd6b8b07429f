"""Shows the effect of a spec before it is applied: its children, and the steps of the rollout (``pdcluster plan``).

No cluster is asked: an earlier spec counts as carried out in full. The steps are the planner's own, if every pod gets
ready and every request is answered. One thing differs: if a step removes a whole revision, its last prefill engine
really goes later, when its decode engines are gone (``last_prefill.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.manifests.pool import Pool, pool_of
from pdcluster_operator.core.manifests.router import router_deployment
from pdcluster_operator.core.names import discovery_service_name
from pdcluster_operator.core.plan.actions import Plan
from pdcluster_operator.core.plan.pool_plan import plan_pool
from pdcluster_operator.core.plan.target import Target, target_of
from pdcluster_operator.core.rollout.fleet import ROLES
from pdcluster_operator.core.rollout.steps import Step, preview_steps
from pdcluster_operator.core.seen.observed import Observed, SeenWorkload, Version
from pdcluster_operator.kinds import LEADER_WORKER_SET
from pdcluster_protocol.errors import ConfigError

_IMAGE: Final = "the operator's"


def preview(before: PDCluster | None, after: PDCluster) -> tuple[str, ...]:
    """Lines for people. ``before``: the spec that runs; None: none runs. LeaderWorkerSet counts as installed.

    Raises:
        ConfigError: ``before`` or ``after`` cannot be carried out; the message says why.
    """
    observed = _observed_of(before)
    pool = pool_of(after, _IMAGE)
    target = target_of(pool, observed)
    if after.metadata.get("deletionTimestamp"):
        return ("nothing is planned: it is being deleted",)
    plan = plan_pool(pool, observed, secret_text="", now=0)
    if plan.facts.refusal:
        raise ConfigError(plan.facts.refusal)
    fleet = target.fleet(is_verified=False, is_paused=False, is_past_deadline=False)
    # Scaling, a first start and a stop are no rollout: nothing holds them (``rollout/steps.py``).
    waits = after.spec.rollout.paused and any(fleet.old) and not plan.facts.is_stopped
    steps = (_step_line(number, step) for number, step in enumerate(preview_steps(fleet), 1))
    return (
        _summary(target, observed),
        *_routers(before, after),
        *_section("children", _made(plan, target)),
        *_section("steps, when rollout.paused is false again" if waits else "steps", steps),
        *_section("removed in the end", _removed(pool, target, observed)),
        *_taken_for_granted(target),
    )


def _observed_of(before: PDCluster | None) -> Observed:
    """The planner's picture of a cluster in which ``before`` runs; None: nothing runs.

    Raises:
        ConfigError: ``before`` cannot be carried out.
    """
    if before is None:
        return Observed(has_leader_worker_sets=True)
    try:
        pool = pool_of(before, _IMAGE)
        target = target_of(pool, Observed(has_leader_worker_sets=True))
        router_deployment(pool)
    except ConfigError as error:
        raise ConfigError(
            f"the earlier spec cannot be carried out ({error}), so the cluster does not run it: "
            "plan without --before and --from-cluster"
        ) from error
    seen = []
    for role in ROLES:
        design, wanted = target.designs[role], target.fleets[role].wanted
        ids = (design.name, design.kind, role, design.revision, design.template, Version(""))
        seen.append(SeenWorkload(*ids, replicas=wanted, live=wanted, ready=wanted))
    return Observed(tuple(seen), has_secret=True, has_leader_worker_sets=True)


def _summary(target: Target, observed: Observed) -> str:
    if not observed.workloads:
        return f"target {target.name}: nothing runs yet"
    if any(workload.revision != target.revision for workload in observed.workloads):
        return f"target {target.name}: another revision, so both roles are replaced"
    replaced = " and ".join(workload.role.value for workload in _replaced(target, observed))
    what = f"the same revision, and only {replaced} is replaced" if replaced else "no engine is replaced"
    return f"target {target.name}: {what}"


def _routers(before: PDCluster | None, after: PDCluster) -> tuple[str, ...]:
    """A line, if Kubernetes will replace the routers, because their pod template changes."""
    if before is None:
        return ()
    old, new = (router_deployment(pool_of(cluster, _IMAGE))["spec"]["template"] for cluster in (before, after))
    return () if old == new else ("routers are replaced, one at a time",)


def _replaced(target: Target, observed: Observed) -> list[SeenWorkload]:
    return [workload for workload in observed.workloads if workload.name != target.designs[workload.role].name]


def _made(plan: Plan, target: Target) -> Iterator[str]:
    """Children of the plan, and workloads of the target that are made in a later step. A stop makes no workload."""
    yield from (f"{child.kind} {child.name}" for child in plan.children)
    there = {child.name for child in plan.children}
    if plan.facts.is_stopped:
        return
    yield from (f"{it.kind.name} {it.name}" for it in target.designs.values() if it.name not in there)


def _removed(pool: Pool, target: Target, observed: Observed) -> Iterator[str]:
    for workload in _replaced(target, observed):
        yield f"{workload.kind.name} {workload.name}"
        if workload.revision != target.revision:
            yield f"Service {discovery_service_name(pool.name, workload.role, workload.revision)}"


def _taken_for_granted(target: Target) -> tuple[str, ...]:
    if all(design.kind != LEADER_WORKER_SET for design in target.designs.values()):
        return ()
    return ("LeaderWorkerSet (leaderworkerset.x-k8s.io/v1) is taken for installed: without it the spec is refused",)


def _step_line(number: int, step: Step) -> str:
    moves = (f"{change.workload} {change.before} -> {change.after}" for change in step.changes)
    return f"{number}. {', '.join(moves)}"


def _section(title: str, lines: Iterable[str]) -> tuple[str, ...]:
    found = tuple(f"  {line}" for line in lines)
    return (f"{title}:", *found) if found else (f"{title}: none",)
