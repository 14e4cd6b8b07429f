"""Plans one look: from a PDCluster and its children as seen. Nothing is remembered from one plan to the next.

    spec -> target -> facts -> status -> next step -> children, moves, prunes

If a spec cannot be carried out, only the status changes, and says why: no child, no move, no prune. Running engines
and routers go on as they are. The API server is asked about a new workload before anything is done, so a refusal comes
while the old engine still runs. Old workloads keep their template: only their replicas move, and empty ones are pruned.
A PDCluster that is being deleted gets no plan: Kubernetes removes its children by their owner.

A proof holds for the engines that gave it. The status that was read may have a proof of a target whose engines are
gone. Then status is written without that proof before a new engine is made. Otherwise, if the write of the status
failed, the old proof would count for the new engines.

Only moves change the replicas of a workload that exists: an apply repeats the number that was seen. A new workload is
created with its number of replicas. If the workload exists already, the picture is old, and the create changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from pdcluster_operator.api.cluster import ScalingMode
from pdcluster_operator.core.manifests import picker
from pdcluster_operator.core.manifests.pool import Pool
from pdcluster_operator.core.manifests.router import router_name
from pdcluster_operator.core.manifests.standing import scaler_selector
from pdcluster_operator.core.manifests.workloads import WorkloadDesign, render_workload, revision_for
from pdcluster_operator.core.plan.actions import Child, Move, Plan, Prune, ScalerStatus, TargetIds, Way
from pdcluster_operator.core.plan.children import Served, standing_children
from pdcluster_operator.core.plan.target import Target, refused_counts, target_of
from pdcluster_operator.core.rollout.fleet import ROLES
from pdcluster_operator.core.rollout.group_order import held_by_groups
from pdcluster_operator.core.rollout.last_prefill import keep_last_prefill
from pdcluster_operator.core.rollout.steps import Change, next_step
from pdcluster_operator.core.seen.observed import Observed, SeenWorkload, VerificationResult, Version
from pdcluster_operator.core.status.conditions import Counts, Reason, Status, Type
from pdcluster_operator.core.status.pool_status import (
    Facts,
    Problems,
    Verification,
    deadline_at,
    reduce_status,
    verified_target,
)
from pdcluster_operator.kinds import SCALER, SERVICE
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role

MISSING_SECRET_S: Final = 10
"""Seconds between two looks for a missing Secret: short enough for a person who waits. A look costs one call."""
_NOT_ASKED: Final = VerificationResult(Verification.NOT_ASKED)


def plan_pool(pool: Pool, observed: Observed, *, secret_text: str, now: int) -> Plan:
    """The plan for a PDCluster that is not being deleted.

    ``secret_text``: fresh random text, taken only if the pool has no secret yet. ``now``: whole Unix seconds.
    """
    try:
        target = target_of(pool, observed)
        left = _left_over(target, observed)
        served = _served(target, left)
        children = standing_children(pool, target, observed, served, secret_text)
    except ConfigError as error:
        return _refused_plan(pool, observed, str(error), now)
    facts = _facts(pool, observed, target.name, target.counts, found=target)
    facts = replace(facts, held_by_groups=_held_by_groups(target, facts, observed.status))
    status = reduce_status(facts, observed.status, now=now)
    waits = _is_proven_by_others(facts, observed.status)
    changes = () if waits else _changes(pool, target, status)
    seen = {workload.name: workload for workload in left}
    there, new = _workloads(pool, target, seen, changes)
    return Plan(
        facts,
        status,
        children=(*there, *children, *new),
        moves=_moves(seen, changes),
        prunes=_prunes(pool, observed, left, served),
        scaler_statuses=_scaler_statuses(pool, observed, facts),
        to_verify=target.ids if _should_verify(facts, status) else None,
        wake_after_s=0 if waits else _wake_after_s(pool, observed, status, now),
        asked=_asked(pool, () if facts.is_stopped else target.designs.values(), seen, children),
    )


def _refused_plan(pool: Pool, observed: Observed, refusal: str, now: int) -> Plan:
    facts = _facts(pool, observed, revision_for(pool), refused_counts(pool, observed), refusal)
    return Plan(facts, reduce_status(facts, observed.status, now=now))


def _facts(
    pool: Pool,
    observed: Observed,
    target: str,
    counts: Mapping[Role, Counts],
    refusal: str = "",
    *,
    found: Target | None = None,
) -> Facts:
    result = observed.verifications.get(target, _NOT_ASKED)
    return Facts(
        generation=pool.generation,
        target=target,
        prefill=counts[Role.PREFILL],
        decode=counts[Role.DECODE],
        routers_wanted=pool.spec.router.replicas,
        routers_ready=observed.routers_ready,
        deadline_s=pool.spec.rollout.progress_deadline_seconds,
        refusal=refusal,
        verification=result.outcome,
        verification_error=result.error,
        is_paused=pool.spec.rollout.paused,
        problems=_problems(observed, found.ids if found else None),
        is_target_empty=found is not None and found.is_empty,
        unknown_fields=observed.unknown_fields,
        missing_secret=observed.missing_secret,
        held_back=picker.held_back(pool, observed.ready_ports),
    )


def _held_by_groups(target: Target, facts: Facts, before: Status | None) -> str:
    """Told of a rollout that is past its deadline too, which makes no step by itself. A proof counts from this look on:
    no other look may come."""
    is_verified = verified_target(facts, before) == target.name
    return held_by_groups(target.fleet(is_verified=is_verified, is_paused=False, is_past_deadline=False))


def _problems(observed: Observed, ids: TargetIds | None) -> Problems:
    """The first problem of each role and of the routers. Problems of the target come first. Problems of old engines
    count too, because old engines may still serve."""
    current: set[tuple[Role | None, str, str]] = {(None, "", "")}
    if ids is not None:
        current |= {
            (Role.PREFILL, ids.revision, ids.prefill_template),
            (Role.DECODE, ids.revision, ids.decode_template),
        }
    told = sorted(observed.problems, key=lambda one: (one.role, one.revision, one.template) not in current)
    first = {role: next((one.text for one in told if one.role is role), "") for role in (*ROLES, None)}
    loop = next((one.text for one in told if one.is_loop), "")
    return Problems(first[Role.PREFILL], first[Role.DECODE], first[None], loop)


def _is_proven_by_others(facts: Facts, before: Status | None) -> bool:
    """Whether the proof in status is of engines that are gone, and new engines are wanted. A stop need not wait."""
    return not facts.is_stopped and facts.is_target_empty and before is not None and before.verified == facts.target


def _changes(pool: Pool, target: Target, status: Status) -> tuple[Change, ...]:
    fleet = target.fleet(
        is_verified=status.verified == target.name,
        is_paused=pool.spec.rollout.paused,
        is_past_deadline=status.reason(Type.PROGRESSING) is Reason.PROGRESS_DEADLINE_EXCEEDED,
    )
    step = next_step(fleet)
    return keep_last_prefill(fleet, step.changes) if step else ()


def _left_over(target: Target, observed: Observed) -> tuple[SeenWorkload, ...]:
    """Workloads that are not pruned: the target's, and old workloads that ask for pods or have pods."""
    names = {design.name for design in target.designs.values()}
    return tuple(seen for seen in observed.workloads if seen.name in names or not seen.is_empty)


def _served(target: Target, left: tuple[SeenWorkload, ...]) -> Served:
    wanted = {(role, target.revision) for role in ROLES}
    return frozenset(wanted | {(seen.role, seen.revision) for seen in left})


def _workloads(
    pool: Pool, target: Target, seen: Mapping[str, SeenWorkload], changes: tuple[Change, ...]
) -> tuple[list[Child], list[Child]]:
    """The target's workloads, in two lists: workloads that are there, and workloads that get their first replica now.

    Workloads that are there are applied before all other children: if one has changed meanwhile, nothing else is done.
    """
    after = {change.workload: change.after for change in changes}
    there, new = [], []
    for design in target.designs.values():
        if found := seen.get(design.name):
            there.append(Child(render_workload(pool, design, found.replicas), Way.APPLY, found.version))
        elif replicas := after.get(design.name):
            new.append(Child(render_workload(pool, design, replicas), Way.CREATE))
    return there, new


def _asked(
    pool: Pool, wanted: Iterable[WorkloadDesign], seen: Mapping[str, SeenWorkload], children: Iterable[Child]
) -> tuple[Child, ...]:
    """Objects that carry what the user wrote: the routers' Deployment and Service, and each workload that is wanted and
    not there yet, even if its first replica comes in a later step."""
    missing = [design for design in wanted if design.name not in seen]
    workloads = [Child(render_workload(pool, design, 0), Way.CREATE) for design in missing]
    name = router_name(pool)
    return (*workloads, *(it for it in children if it.name == name and it.kind in ("Deployment", "Service")))


def _moves(seen: Mapping[str, SeenWorkload], changes: tuple[Change, ...]) -> tuple[Move, ...]:
    there = [(change, seen[change.workload]) for change in changes if change.workload in seen]
    return tuple(Move(change, workload.kind, workload.version) for change, workload in there)


def _prunes(pool: Pool, observed: Observed, left: tuple[SeenWorkload, ...], served: Served) -> tuple[Prune, ...]:
    kept = {workload.name for workload in left}
    workloads = [
        Prune(workload.kind, workload.name, workload.version)
        for workload in observed.workloads
        if workload.name not in kept
    ]
    services = [
        Prune(SERVICE, service.name, Version(service.version.uid))
        for service in observed.services
        if (service.role, service.revision) not in served
    ]
    is_scaled = pool.spec.scaling.mode is ScalingMode.EXTERNAL
    unused = () if is_scaled else observed.scalers
    scalers = [Prune(SCALER, scaler.name, Version(scaler.version.uid)) for scaler in unused]
    return (*workloads, *services, *scalers)


def _scaler_statuses(pool: Pool, observed: Observed, facts: Facts) -> tuple[ScalerStatus, ...]:
    if pool.spec.scaling.mode is not ScalingMode.EXTERNAL:
        return ()
    return tuple(
        ScalerStatus(scaler.name, facts.of(scaler.role).replicas, scaler_selector(pool, scaler.role))
        for scaler in observed.scalers
    )


def _should_verify(facts: Facts, status: Status) -> bool:
    """Whether a router and an engine of each role are ready, and no request was answered through this target yet."""
    if facts.is_proof_void:
        return False  # The engines that are there go.
    has_engines = all(facts.of(role).updated_ready for role in ROLES)
    return has_engines and facts.routers_ready > 0 and status.verified != facts.target


def _wake_after_s(pool: Pool, observed: Observed, status: Status, now: int) -> int | None:
    """Seconds until the progress deadline or the next look for a missing Secret; None: neither is due. Secrets are not
    watched."""
    deadline = deadline_at(status, pool.spec.rollout.progress_deadline_seconds)
    waits = [] if deadline is None else [max(deadline - now, 0)]
    return min([*waits, *([MISSING_SECRET_S] if observed.missing_secret else [])], default=None)
