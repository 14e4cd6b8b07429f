"""The input of a plan: the state of one PDCluster's children, as far as the caches show it. Data only.

An *instance* counts once, even if it is a group of pods: only the pod that answers HTTP counts (label ``LEADER``).
Pictures may be old, so workloads, Services and scalers carry the version at which they were seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdcluster_operator.core.rollout.fleet import Workload
from pdcluster_operator.core.status.conditions import Status
from pdcluster_operator.core.status.pool_status import Verification
from pdcluster_operator.kinds import Kind
from pdcluster_protocol.labels import Role


@dataclass(frozen=True, slots=True)
class Version:
    """One state of one object. An empty ``resource_version`` means any."""

    uid: str
    resource_version: str = ""


@dataclass(frozen=True, slots=True)
class SeenWorkload:
    """A Deployment or LeaderWorkerSet of ours. Role and hashes are its labels'; numbers as in ``fleet.Workload``."""

    name: str
    kind: Kind
    role: Role
    revision: str
    template: str
    version: Version
    created_s: int = 0
    """Unix seconds."""
    replicas: int = 0
    live: int = 0
    ready: int = 0
    terminating: int = 0
    ready_groups: tuple[int, ...] | None = None

    @property
    def as_numbers(self) -> Workload:
        # Ready and live may come from pictures of different moments.
        ready = min(self.ready, self.live)
        groups = self.ready_groups and self.ready_groups[:ready]
        return Workload(self.name, self.revision, self.replicas, self.live, ready, self.terminating, groups)

    @property
    def is_empty(self) -> bool:
        """Whether the workload asks for no pods and has none."""
        return not self.replicas and not self.live and not self.terminating


@dataclass(frozen=True, slots=True)
class SeenService:
    """A discovery Service of ours. Role and revision are from its labels."""

    name: str
    role: Role
    revision: str
    version: Version


@dataclass(frozen=True, slots=True)
class SeenScaler:
    """A PDRoleScaler of ours. ``replicas``: its ``spec.replicas``."""

    name: str
    role: Role
    replicas: int
    version: Version


@dataclass(frozen=True, slots=True)
class SeenProblem:
    """Why a pod does not get ready, or why pods are not made, in words. ``role``: None for routers.

    ``is_loop``: a container dies of the same cause again and again.
    """

    role: Role | None
    revision: str
    template: str
    text: str
    is_loop: bool = False


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The outcome of the last request that was sent through a target. ``error``: why it failed, for people."""

    outcome: Verification
    error: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a plan needs to know of the cluster."""

    workloads: tuple[SeenWorkload, ...] = ()
    services: tuple[SeenService, ...] = ()
    scalers: tuple[SeenScaler, ...] = ()
    has_secret: bool = False
    """Whether the secret that the operator makes is there."""
    has_leader_worker_sets: bool = False
    """Whether the API server knows LeaderWorkerSets (``leaderworkerset.x-k8s.io/v1``)."""
    routers_ready: int = 0
    ready_ports: frozenset[str] = frozenset()
    """Names of the ports of ready routers."""
    verifications: Mapping[str, VerificationResult] = field(default_factory=dict)
    """By name of the target."""
    problems: tuple[SeenProblem, ...] = ()
    """In the order in which users are told of them."""
    status: Status | None = None
    """The PDCluster's status as it was read; None: it has none."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the PDCluster that this operator does not know: its CRD is newer."""
    missing_secret: str = ""
    """The problem of a Secret that the user has named and routers mount, and the cure, for people; empty: none."""
