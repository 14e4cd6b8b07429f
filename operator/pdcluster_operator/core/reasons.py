"""What each condition and each reason of a PDCluster's status means, and which reasons a condition can have.

Data for people: the reference page is made of it, and ``explain`` has the cure to each reason that needs one. A test
walks the reducer's cases and holds that this is exactly what it can say.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.core.conditions import Reason, Truth, Type

TRUE_MEANS: Final[dict[Type, str]] = {
    Type.ACCEPTED: "the spec can be carried out on this cluster",
    Type.PREFILL_READY: "all wanted prefill instances are of what the spec asks for, and ready",
    Type.DECODE_READY: "the same of decode",
    Type.ROUTER_READY: "all routers are ready",
    Type.TRANSFER_VERIFIED: (
        "a real request was answered with KV that was pushed, through what the spec asks for, and both engines have "
        "compared its content"
    ),
    Type.PROGRESSING: "a rollout moves, or is complete",
    Type.DEGRADED: "fewer are ready than promised, or a rollout or a transfer has failed: what a pager should hear",
    Type.READY: "the five before `Progressing` are True: clients are served as the spec asks",
}

MEANS: Final[dict[Reason, str]] = {
    Reason.VALID: "the spec can be carried out",
    Reason.UNKNOWN_FIELDS: "the spec is carried out without the fields that the message names: the CRD is newer than "
    "the operator",
    Reason.REFUSED: "the spec cannot be carried out, as the message says; what runs stays as it is",
    Reason.NOT_ACCEPTED: "nothing moves, for the spec is refused",
    Reason.INSTANCES_READY: "all wanted instances are up to date and ready",
    Reason.INSTANCES_NOT_READY: "engines are starting, or cannot",
    Reason.SCALED_TO_ZERO: "0 replicas of both roles are wanted",
    Reason.ROUTERS_READY: "all routers are ready",
    Reason.ROUTERS_NOT_READY: "routers are starting, or cannot",
    Reason.VERIFIED: "a request was answered with pushed KV",
    Reason.VERIFICATION_PENDING: "a request is sent as soon as a router and one engine of each role are ready",
    Reason.VERIFICATION_FAILED: "engines are up, and KV does not get from prefill to decode",
    Reason.ROLLING_OUT: "a rollout moves",
    Reason.ROLLOUT_COMPLETE: "what the spec asks for is what runs, and it is verified",
    Reason.ROLLOUT_PAUSED: "`rollout.paused` is true",
    Reason.CRASH_LOOP: "a container died three times in a row of the same cause, and nothing got better since",
    Reason.PROGRESS_DEADLINE_EXCEEDED: "no count got better for `rollout.progressDeadlineSeconds`; the rollout stopped",
    Reason.AS_WANTED: "no fewer are ready than promised",
    Reason.TOO_FEW_READY: "fewer engines are ready than wanted less `rollout.maxUnavailable`, or no router is",
    Reason.SERVING: "all instances are ready, and a transfer was verified",
}

_ROLE_READY: Final = {
    Reason.INSTANCES_READY: Truth.TRUE,
    Reason.INSTANCES_NOT_READY: Truth.FALSE,
    Reason.SCALED_TO_ZERO: Truth.FALSE,
}
REASONS_OF: Final[dict[Type, dict[Reason, Truth]]] = {
    Type.ACCEPTED: {
        Reason.VALID: Truth.TRUE,
        Reason.UNKNOWN_FIELDS: Truth.TRUE,
        Reason.REFUSED: Truth.FALSE,
    },
    Type.PREFILL_READY: _ROLE_READY,
    Type.DECODE_READY: _ROLE_READY,
    Type.ROUTER_READY: {Reason.ROUTERS_READY: Truth.TRUE, Reason.ROUTERS_NOT_READY: Truth.FALSE},
    Type.TRANSFER_VERIFIED: {
        Reason.VERIFIED: Truth.TRUE,
        Reason.VERIFICATION_PENDING: Truth.UNKNOWN,
        Reason.VERIFICATION_FAILED: Truth.FALSE,
        Reason.SCALED_TO_ZERO: Truth.UNKNOWN,
    },
    Type.PROGRESSING: {
        Reason.ROLLING_OUT: Truth.TRUE,
        Reason.ROLLOUT_COMPLETE: Truth.TRUE,
        Reason.ROLLOUT_PAUSED: Truth.UNKNOWN,
        Reason.NOT_ACCEPTED: Truth.UNKNOWN,
        Reason.CRASH_LOOP: Truth.FALSE,
        Reason.PROGRESS_DEADLINE_EXCEEDED: Truth.FALSE,
    },
    Type.DEGRADED: {
        Reason.AS_WANTED: Truth.FALSE,
        Reason.TOO_FEW_READY: Truth.TRUE,
        Reason.CRASH_LOOP: Truth.TRUE,
        Reason.VERIFICATION_FAILED: Truth.TRUE,
        Reason.PROGRESS_DEADLINE_EXCEEDED: Truth.TRUE,
    },
    Type.READY: {
        Reason.SERVING: Truth.TRUE,
        Reason.REFUSED: Truth.FALSE,
        Reason.INSTANCES_NOT_READY: Truth.FALSE,
        Reason.ROUTERS_NOT_READY: Truth.FALSE,
        Reason.SCALED_TO_ZERO: Truth.FALSE,
        Reason.VERIFICATION_PENDING: Truth.FALSE,
        Reason.VERIFICATION_FAILED: Truth.FALSE,
    },
}
"""``Ready`` repeats the reason of the first condition that it lacks, ``Degraded`` of the one that failed."""
