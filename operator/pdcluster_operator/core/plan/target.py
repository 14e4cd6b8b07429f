"""Works out the target of a spec: the two workloads that it asks for, and each role's numbers.

The wanted numbers come from the spec, or from the scalers. Numbers of scalers are brought within the ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pdcluster_operator.api.base import MAX_REPLICAS
from pdcluster_operator.api.cluster import PDClusterSpec, ScalingMode
from pdcluster_operator.core.manifests.pool import Pool
from pdcluster_operator.core.manifests.workloads import WorkloadDesign, design_workload, revision_for
from pdcluster_operator.core.plan.actions import TargetIds
from pdcluster_operator.core.rollout.fleet import ROLES, Fleet, RoleFleet, Workload, resolve_limits
from pdcluster_operator.core.rollout.scaling import Bounds, Pair, exact_ratio
from pdcluster_operator.core.seen.observed import Observed, SeenWorkload
from pdcluster_operator.core.status.conditions import Counts, counts_of
from pdcluster_operator.kinds import LEADER_WORKER_SET
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role

_MOST: Final = Pair(MAX_REPLICAS, MAX_REPLICAS)


@dataclass(frozen=True, slots=True)
class Target:
    """The target. ``designs``: its two workloads. ``fleets``: each role's numbers, and its old workloads too."""

    revision: str
    designs: Mapping[Role, WorkloadDesign]
    fleets: Mapping[Role, RoleFleet]

    @property
    def ids(self) -> TargetIds:
        return TargetIds(self.revision, self.designs[Role.PREFILL].template, self.designs[Role.DECODE].template)

    @property
    def name(self) -> str:
        return self.ids.name

    @property
    def is_empty(self) -> bool:
        """Whether a role has no replica of the target. Its next instance is then a new engine, without a proof."""
        return not all(self.fleets[role].target.replicas for role in ROLES)

    @property
    def counts(self) -> Mapping[Role, Counts]:
        return {role: counts_of(self.fleets[role]) for role in ROLES}

    def fleet(self, *, is_verified: bool, is_paused: bool, is_past_deadline: bool) -> Fleet:
        prefill, decode = (self.fleets[role] for role in ROLES)
        return Fleet(prefill, decode, is_verified, is_paused, is_past_deadline)


def target_of(pool: Pool, observed: Observed) -> Target:
    """The target of the spec.

    Raises:
        ConfigError: The spec cannot be carried out. The message names the fields and the cure.
    """
    revision = revision_for(pool)
    designs = {role: design_workload(pool, role, revision) for role in ROLES}
    for design in designs.values():
        _require_groups(pool, design, observed)
    wanted = wanted_of(pool.spec, {scaler.role: scaler.replicas for scaler in observed.scalers})
    _require_both(wanted)
    fleets = {role: _role_fleet(pool, designs[role], wanted[role], observed) for role in ROLES}
    return Target(revision, designs, fleets)


def wanted_of(spec: PDClusterSpec, scalers: Mapping[Role, int]) -> Mapping[Role, int]:
    """Instances wanted of each role. ``scalers``: replicas that scalers ask for; for a role without one, the spec's.

    Raises:
        ConfigError: No numbers fit the ratio.
    """
    own = Pair(spec.roles.prefill.replicas, spec.roles.decode.replicas)
    if spec.scaling.mode is ScalingMode.FIXED:
        return _by_role(own)
    wish = Pair(scalers.get(Role.PREFILL, own.prefill), scalers.get(Role.DECODE, own.decode))
    return _by_role(_bounds_of(spec).fit(wish))


def _bounds_of(spec: PDClusterSpec) -> Bounds:
    ratio = spec.scaling.ratio
    if ratio is None:
        return Bounds(most=_MOST)
    try:
        return Bounds(exact_ratio(ratio.min), exact_ratio(ratio.max), most=_MOST)
    except ValueError as error:
        raise ConfigError(f"scaling.ratio: {error}") from error


def _by_role(pair: Pair) -> Mapping[Role, int]:
    return {Role.PREFILL: pair.prefill, Role.DECODE: pair.decode}


def refused_counts(pool: Pool, observed: Observed) -> Mapping[Role, Counts]:
    """Counts while the spec cannot be carried out: all running engines count as old."""
    return {role: counts_of(_fleet_of_refused(pool, role, observed)) for role in ROLES}


def _fleet_of_refused(pool: Pool, role: Role, observed: Observed) -> RoleFleet:
    old = tuple(seen.as_numbers for seen in _seen(observed, role))
    return RoleFleet(Workload("", ""), pool.role(role).replicas, 1, 0, old)


def _role_fleet(pool: Pool, design: WorkloadDesign, wanted: int, observed: Observed) -> RoleFleet:
    seen = {workload.name: workload.as_numbers for workload in _seen(observed, design.role)}
    target = seen.pop(design.name, Workload(design.name, design.revision))
    surge, unavailable = _limits(pool, wanted)
    return RoleFleet(target, wanted, surge, unavailable, tuple(seen.values()))


def _seen(observed: Observed, role: Role) -> list[SeenWorkload]:
    """The role's workloads, oldest first, for the caches have no order."""
    ours = [workload for workload in observed.workloads if workload.role is role]
    return sorted(ours, key=lambda workload: (workload.created_s, workload.name))


def _limits(pool: Pool, wanted: int) -> tuple[int, int]:
    rollout = pool.spec.rollout
    try:
        return resolve_limits(rollout.max_surge, rollout.max_unavailable, wanted)
    except ValueError as error:
        raise ConfigError(f"spec.rollout: {error}") from error


def _require_groups(pool: Pool, design: WorkloadDesign, observed: Observed) -> None:
    if design.kind == LEADER_WORKER_SET and not observed.has_leader_worker_sets:
        nodes = pool.role(design.role).nodes_per_instance
        raise ConfigError(
            f"{design.role.value} has nodesPerInstance {nodes}, and this cluster has no LeaderWorkerSet "
            "(leaderworkerset.x-k8s.io/v1): install LWS, or set nodesPerInstance to 1"
        )


def _require_both(wanted: Mapping[Role, int]) -> None:
    """Refuse 0 of one role alone. The API server does so too, but an object may be older than that rule."""
    prefill, decode = (wanted[role] for role in ROLES)
    if bool(prefill) != bool(decode):
        raise ConfigError(f"prefill has {prefill} replicas, decode has {decode}: give both some, or both 0")
