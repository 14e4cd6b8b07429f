"""The indexes' picture of one PDCluster's children, and the plan's wishes about it. Data only.

An *instance* is counted once, also where it is a group of pods: by the pod that answers HTTP (label ``LEADER``).
Pictures may be old. So everything that is changed or removed carries what it was decided on: the uid, and the
resourceVersion where a number decides (moves, and workloads that are empty); an old picture then is a conflict at the
API server, not a wrong step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from pdcluster_operator.core.conditions import Status
from pdcluster_operator.core.fleet import Workload
from pdcluster_operator.core.manifests.pool import Document
from pdcluster_operator.core.rollout import Change
from pdcluster_operator.core.status import Facts, Verification
from pdcluster_operator.kinds import Kind
from pdcluster_protocol.labels import Role


@dataclass(frozen=True, slots=True)
class Version:
    """One state of one object. An empty ``resource_version`` means any."""

    uid: str
    resource_version: str = ""


@dataclass(frozen=True, slots=True)
class SeenWorkload:
    """A Deployment or LeaderWorkerSet of ours; role and hashes from its labels, numbers as in ``fleet.Workload``."""

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

    @property
    def as_numbers(self) -> Workload:
        # Ready and live may come from pictures of different moments.
        ready = min(self.ready, self.live)
        return Workload(self.name, self.revision, self.replicas, self.live, ready, self.terminating)

    @property
    def is_empty(self) -> bool:
        """Asks for no pods and has none."""
        return not self.replicas and not self.live and not self.terminating


@dataclass(frozen=True, slots=True)
class SeenService:
    """A discovery Service of ours; role and revision from its labels."""

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
    """The cluster's facts about pods that do not get ready, or are not made. ``role``: None for routers.

    ``is_loop``: a container dies of the same cause again and again.
    """

    role: Role | None
    revision: str
    template: str
    text: str
    is_loop: bool = False


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The fate of the last request that was sent through a target. ``error``: why it failed, for people."""

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
    verifications: Mapping[str, VerificationResult] = field(default_factory=dict)
    """By target."""
    problems: tuple[SeenProblem, ...] = ()
    """The one to tell first is at the front."""
    status: Status | None = None
    """The PDCluster's status as it was."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the PDCluster that only another version of its CRD knows."""
    missing_secret: str = ""
    """The problem of a Secret that the user has named for routers, and what helps, for people."""


class Way(Enum):
    """How a child is brought about."""

    APPLY = auto()
    """Server-side apply, whenever it differs."""
    CREATE = auto()
    """A plain create. One that is there already is left alone: the picture was old."""


@dataclass(frozen=True, slots=True)
class Child:
    """One object that should be as ``document`` says. ``version``: of the one that is there, where it matters."""

    document: Document
    way: Way = Way.APPLY
    version: Version | None = None

    @property
    def kind(self) -> str:
        return str(self.document["kind"])

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Move:
    """Set ``spec.replicas`` of a workload that is there, if it is still of this version."""

    change: Change
    kind: Kind
    version: Version


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete an object if it still has this version. Kubernetes deletes its dependents after it (background).

    A workload is deleted only at the resourceVersion at which it was seen empty. Of other objects the uid suffices,
    for no number was decided on.
    """

    kind: Kind
    name: str
    version: Version


@dataclass(frozen=True, slots=True)
class ScalerStatus:
    """The status that a PDRoleScaler should have."""

    name: str
    replicas: int
    selector: str


@dataclass(frozen=True, slots=True)
class TargetIds:
    """The hashes that name a target: what both roles share, and each role's pod template."""

    revision: str
    prefill_template: str
    decode_template: str

    @property
    def name(self) -> str:
        """All three in one word: what is verified, and what status speaks of. 26 characters. Never taken apart."""
        return f"{self.revision}-{self.prefill_template}-{self.decode_template}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan's actions, in this order: children, moves, prunes, scalers' statuses, status.

    ``asked``: objects that carry the user's overrides. The API server is asked for each whether it would take it,
    before anything is done, so that a spec which it refuses changes nothing of what runs. For a stop these are only the
    routers'. ``facts``: what ``status`` was reduced from. ``to_verify``: the target, when a request through it can be
    sent, and none was answered yet. ``wake_after_s``: plan again then, even if nothing happens.
    """

    facts: Facts
    status: Status
    children: tuple[Child, ...] = ()
    moves: tuple[Move, ...] = ()
    prunes: tuple[Prune, ...] = ()
    scaler_statuses: tuple[ScalerStatus, ...] = ()
    to_verify: TargetIds | None = None
    wake_after_s: int | None = None
    asked: tuple[Child, ...] = ()
