"""The vocabulary of a PDCluster's status: its conditions, their reasons, and the counts beside them. Data only.

Times are whole Unix seconds, as Kubernetes writes them: what is read back equals what was written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from pdcluster_operator.core.fleet import RoleFleet
from pdcluster_protocol.labels import Role


class Type(Enum):
    """In the order in which they are written, each after those that it depends on."""

    ACCEPTED = "Accepted"
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    ROUTER_READY = "RouterReady"
    TRANSFER_VERIFIED = "TransferVerified"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    READY = "Ready"


class Truth(Enum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(Enum):
    """Why a condition is as it is. A reason always has the same truth in the same condition."""

    VALID = "Valid"
    UNKNOWN_FIELDS = "UnknownFields"
    REFUSED = "Refused"
    NOT_ACCEPTED = "NotAccepted"
    INSTANCES_READY = "InstancesReady"
    INSTANCES_NOT_READY = "InstancesNotReady"
    SCALED_TO_ZERO = "ScaledToZero"
    ROUTERS_READY = "RoutersReady"
    ROUTERS_NOT_READY = "RoutersNotReady"
    VERIFIED = "Verified"
    VERIFICATION_PENDING = "VerificationPending"
    VERIFICATION_FAILED = "VerificationFailed"
    ROLLING_OUT = "RollingOut"
    ROLLOUT_COMPLETE = "RolloutComplete"
    ROLLOUT_PAUSED = "RolloutPaused"
    CRASH_LOOP = "CrashLoop"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    AS_WANTED = "AsWanted"
    TOO_FEW_READY = "TooFewReady"
    SERVING = "Serving"


@dataclass(frozen=True, slots=True)
class Condition:
    """One fact. ``transition_s``: when its truth changed last; ``update_s``: of Progressing, the time of last progress.

    The second is a Deployment condition's ``lastUpdateTime``: a deadline counted from it survives the operator.
    """

    type: Type
    truth: Truth
    reason: Reason
    message: str
    observed_generation: int
    transition_s: int
    update_s: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """One role's instances, as in a Deployment's status. ``updated``: the target's. ``least``: wanted - unavailable."""

    wanted: int = 0
    least: int = 0
    replicas: int = 0
    updated: int = 0
    ready: int = 0
    updated_ready: int = 0
    terminating: int = 0

    @property
    def is_updated(self) -> bool:
        """Whether all wanted are of the target and ready, and no old one is left but those that are going."""
        return self.updated_ready >= self.wanted and self.replicas == self.updated == self.wanted


def counts_of(role: RoleFleet) -> Counts:
    workloads = role.workloads
    return Counts(
        wanted=role.wanted,
        least=role.floor,
        replicas=sum(workload.live for workload in workloads),
        updated=role.target.live,
        ready=sum(workload.ready for workload in workloads),
        updated_ready=role.target.ready,
        terminating=sum(workload.terminating for workload in workloads),
    )


@dataclass(frozen=True, slots=True)
class Status:
    """All that the operator found. ``target``: revision and templates that the spec asks for; ``verified``: those that
    a request was last answered through, or none."""

    observed_generation: int
    target: str
    verified: str
    prefill: Counts
    decode: Counts
    conditions: tuple[Condition, ...] = ()

    def of(self, role: Role) -> Counts:
        return self.prefill if role is Role.PREFILL else self.decode

    def condition(self, wanted: Type) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type is wanted), None)

    def reason(self, wanted: Type) -> Reason | None:
        found = self.condition(wanted)
        return found.reason if found else None

    def with_condition(self, condition: Condition) -> Status:
        return replace(self, conditions=(*self.conditions, condition))
