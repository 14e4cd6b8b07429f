"""The meaning of each condition that is True, and the reasons that each condition of a PDCluster can have.

Data for the reference page. ``Reason`` itself has the meaning and cure of each reason. A test walks the cases of
``reduce_status`` and checks that they give exactly these reasons.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.core.status.conditions import Reason, Truth, Type

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
        Reason.HELD_BY_GROUPS: Truth.FALSE,
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
"""``Ready`` repeats the reason of the first condition that it lacks, ``Degraded`` that of the condition that failed."""
