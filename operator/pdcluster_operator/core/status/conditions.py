"""The vocabulary of a PDCluster's status: its conditions, their reasons, and the counts beside them. Data only.

Times are whole Unix seconds: Kubernetes writes no fractions, so a time that is read back equals the one written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Self

from pdcluster_operator.core.rollout.fleet import RoleFleet
from pdcluster_protocol.labels import Role


class Type(Enum):
    """Types of conditions in the order in which they are written: each after the types that it depends on."""

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


class _Explained(Enum):
    """A word that users meet in a status or an Event.

    ``means``: for the reference page. ``cure``: what the user should do; empty where nothing has to be done.
    ``pdcluster explain`` and the reference page print the cure.
    """

    means: str
    cure: str

    def __new__(cls, word: str, means: str = "", cure: str = "") -> Self:
        told = object.__new__(cls)
        told._value_ = word
        told.means = means
        told.cure = cure
        return told


class Reason(_Explained):
    """Why a condition has its truth. In one condition a reason always has the same truth."""

    VALID = ("Valid", "the spec can be carried out")
    UNKNOWN_FIELDS = (
        "UnknownFields",
        "the spec is carried out without the fields that the message names: the CRD is newer than the operator",
        "Upgrade the operator to the version of the CRD, or take the fields out of the PDCluster.",
    )
    REFUSED = (
        "Refused",
        "the spec cannot be carried out, as the message says; what runs stays as it is",
        "Change the spec as the message says; until then what runs stays as it is.",
    )
    NOT_ACCEPTED = (
        "NotAccepted",
        "nothing moves, for the spec is refused",
        "Change the spec as Accepted says.",
    )
    INSTANCES_READY = ("InstancesReady", "all wanted instances are up to date and ready")
    INSTANCES_NOT_READY = (
        "InstancesNotReady",
        "engines are starting, or cannot",
        (
            "Engines take minutes to load a model. If the number does not rise, look at the pods: `kubectl describe "
            "pod` tells why one is not placed or started, `kubectl logs` why an engine does not come up."
        ),
    )
    SCALED_TO_ZERO = (
        "ScaledToZero",
        "0 replicas of both roles are wanted",
        "Nothing runs because 0 replicas are wanted of both roles. Ask for at least 1 of each.",
    )
    ROUTERS_READY = ("RoutersReady", "all routers are ready")
    ROUTERS_NOT_READY = (
        "RoutersNotReady",
        "routers are starting, or cannot",
        "Look at the router's pods with `kubectl describe pod` and `kubectl logs`.",
    )
    VERIFIED = ("Verified", "a request was answered with pushed KV")
    VERIFICATION_PENDING = (
        "VerificationPending",
        "a request is sent as soon as a router and one engine of each role are ready",
        "A request is sent by itself as soon as a router and one engine of each role are ready. Nothing to do.",
    )
    VERIFICATION_FAILED = (
        "VerificationFailed",
        "engines are up, and KV does not get from prefill to decode",
        (
            "Engines are up, but KV does not get from prefill to decode. Check transfer.protocol, network policies "
            "between prefill and decode, and the engines' logs. To go back, apply the spec before it."
        ),
    )
    ROLLING_OUT = (
        "RollingOut",
        "a rollout moves",
        "A rollout is under way and moves by itself. Nothing to do.",
    )
    HELD_BY_GROUPS = (
        "HeldByGroups",
        "the next step would take a ready engine over several nodes away, below `rollout.maxUnavailable`",
        "It goes on by itself when the groups that the message names are ready, or do as it says.",
    )
    ROLLOUT_COMPLETE = ("RolloutComplete", "what the spec asks for is what runs, and it is verified")
    ROLLOUT_PAUSED = (
        "RolloutPaused",
        "`rollout.paused` is true",
        "Set rollout.paused to false to go on, or apply the spec before it to go back.",
    )
    CRASH_LOOP = (
        "CrashLoop",
        "a container died three times in a row of the same cause, and nothing got better since",
        (
            "It does not mend itself. The message has the last lines of the log; `kubectl logs --previous` has all of"
            " it. Exit code 137 with OOMKilled is too little memory: raise resources, or take less of it in "
            "engineArgs. Mend it, or apply the spec before it to go back."
        ),
    )
    PROGRESS_DEADLINE_EXCEEDED = (
        "ProgressDeadlineExceeded",
        "no count got better for `rollout.progressDeadlineSeconds`; the rollout stopped",
        (
            "The rollout has stopped; what still runs goes on serving. Mend what keeps new pods from getting ready or "
            "old pods from going, and it goes on by itself. It also goes on, with a new deadline, when the spec is "
            "changed. Or apply the spec before it to go back."
        ),
    )
    AS_WANTED = ("AsWanted", "no fewer are ready than promised")
    TOO_FEW_READY = (
        "TooFewReady",
        "fewer engines are ready than wanted less `rollout.maxUnavailable`, or no router is",
        "Requests are served by fewer engines than promised. `kubectl get pods` shows which are not ready.",
    )
    SERVING = ("Serving", "all instances are ready, and a transfer was verified")


class EventReason(_Explained):
    """Reasons of Events that tell of no condition."""

    TAKEN_BACK = (
        "TakenBack",
        "somebody else had set a field of a child that the operator sets too; it is set back",
        "Put the value into the spec: `router.replicas`, or `scaling.mode: External` and a PDRoleScaler for engines.",
    )


@dataclass(frozen=True, slots=True)
class Condition:
    """One fact. ``transition_s``: when its truth changed last. ``update_s``: time of the last progress, only of
    Progressing.

    ``update_s`` is written as ``lastUpdateTime``, as in a Deployment. So a new leader counts the same deadline.
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
    """One role's instances, as in a Deployment's status. ``updated``: instances of the target. ``least``: how many must
    stay ready, wanted - unavailable."""

    wanted: int = 0
    least: int = 0
    replicas: int = 0
    updated: int = 0
    ready: int = 0
    updated_ready: int = 0
    terminating: int = 0

    @property
    def is_updated(self) -> bool:
        """Whether all wanted instances are the target's and ready, and any old instance that is left terminates."""
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


_READINESS: Final = frozenset({Type.PREFILL_READY, Type.DECODE_READY, Type.ROUTER_READY, Type.DEGRADED, Type.READY})


def _worse(was: Condition, found: Condition | None) -> Condition:
    """``found`` if it tells of a loss that ``was`` does not."""
    if found is None or was.type not in _READINESS:
        return was
    bad = Truth.TRUE if was.type is Type.DEGRADED else Truth.FALSE
    return found if found.truth is bad and was.truth is not bad else was


@dataclass(frozen=True, slots=True)
class Status:
    """All that the operator found. ``target``: name of the target that the spec asks for. ``verified``: name of the
    target that is proven; empty: none is."""

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

    def with_losses_of(self, found: Status) -> Status:
        """This status with those conditions of ``found`` that say that something is not ready any more.

        All else stays as it was, so a later look still sees what has got better since.
        """
        told = tuple(_worse(one, found.condition(one.type)) for one in self.conditions)
        return replace(self, conditions=told)

    def with_condition(self, condition: Condition) -> Status:
        return replace(self, conditions=(*self.conditions, condition))
