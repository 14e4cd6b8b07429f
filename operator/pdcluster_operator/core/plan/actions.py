"""The output of the planner: the actions of a plan, in their order. Data only.

Pictures may be old. So each change and removal carries the version that it was decided on: the uid, and also the
resourceVersion if it was decided by a number (moves, and removals of empty workloads). If the picture is old, the API
server then answers with a conflict, and no wrong step is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from pdcluster_operator.core.manifests.pool import Document
from pdcluster_operator.core.rollout.steps import Change
from pdcluster_operator.core.seen.observed import Version
from pdcluster_operator.core.status.conditions import Status
from pdcluster_operator.core.status.pool_status import Facts
from pdcluster_operator.kinds import Kind


class Way(Enum):
    """How a child is made to be as its document says."""

    APPLY = auto()
    """Server-side apply, whenever the child differs."""
    CREATE = auto()
    """A plain create. If the child is there already, the picture was old, and the child is left as it is."""


@dataclass(frozen=True, slots=True)
class Child:
    """One object that should be as ``document`` says. ``version``: apply it only to this version; None: to any."""

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
    """Set ``spec.replicas`` of a workload that is there, if the workload still has this version."""

    change: Change
    kind: Kind
    version: Version


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete an object if it still has this version. Kubernetes deletes its dependents after it (background).

    A workload is deleted only at the resourceVersion at which it was seen empty. For other objects the uid suffices:
    their removal depends on no number.
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
        """The three hashes in one word of 26 characters: the target's name in status and verifications."""
        return f"{self.revision}-{self.prefill_template}-{self.decode_template}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan's actions, in this order: children, moves, prunes, scalers' statuses, status.

    ``asked``: objects that carry the user's overrides. Before any action the API server is asked whether it would take
    each of these objects. So a spec that it refuses changes nothing that runs. A stop asks only about the routers'
    objects. ``facts``: the findings that ``status`` was made from. ``to_verify``: the target, if a request through it
    can be sent and none was answered yet. ``wake_after_s``: seconds until the next plan, even if nothing happens.
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
