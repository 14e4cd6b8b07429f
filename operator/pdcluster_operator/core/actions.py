"""The output of a plan: the actions that it asks for, in their order. Data only.

Pictures may be old. So everything that is changed or removed carries what it was decided on: the uid, and the
resourceVersion where a number decides (moves, and workloads that are empty); an old picture then is a conflict at the
API server, not a wrong step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from pdcluster_operator.core.conditions import Status
from pdcluster_operator.core.manifests.pool import Document
from pdcluster_operator.core.observed import Version
from pdcluster_operator.core.rollout import Change
from pdcluster_operator.core.status import Facts
from pdcluster_operator.kinds import Kind


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
