"""Writes a PDCluster's status as JSON and reads it back; writes an Event as JSON, which ``kubectl describe`` shows.

A status that was written is read back as the same status, which a test checks. Only ``Counts.least`` is not in JSON, so
it is not read back; no code needs it of an earlier status.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError

from pdcluster_operator.api.cluster import PDClusterSpec
from pdcluster_operator.api.status import (
    ConditionStatus,
    PDClusterStatus,
    RolesStatus,
    RoleStatus,
    RouterStatus,
    WireCondition,
    summary_of,
)
from pdcluster_operator.core.seen.object_views import View
from pdcluster_operator.core.seen.picture import Routers
from pdcluster_operator.core.status.conditions import Condition, Counts, Reason, Status, Truth, Type
from pdcluster_operator.core.status.status_events import KubernetesEvent
from pdcluster_operator.kinds import EVENT, Object
from pdcluster_protocol.labels import MANAGER

MAX_MESSAGE: Final = 1024
"""Characters of an Event's message: the limit of the newer Events API. The whole message is in the condition."""
_MAX_NAME: Final = 253
_TYPES: Final = frozenset(one.value for one in Type)
_REASONS: Final = frozenset(one.value for one in Reason)


def status_document(status: Status, spec: PDClusterSpec, routers: Routers, url: str) -> dict[str, Any]:
    """The status as JSON. ``url``: where clients find the OpenAI API.

    An ended proof is written as an empty field. If an apply left the field out, and another manager (a backup's
    restore) owned it too, the old proof would stay.
    """
    return PDClusterStatus(
        observed_generation=status.observed_generation,
        conditions=tuple(map(_to_wire, status.conditions)),
        roles=RolesStatus(
            prefill=_role_to_wire(status.prefill, spec.roles.prefill.parallelism.tensor),
            decode=_role_to_wire(status.decode, spec.roles.decode.parallelism.tensor),
        ),
        router=RouterStatus(replicas=routers.there, ready=routers.ready),
        model=spec.model.public_name,
        url=url,
        target=status.target,
        verified_target=status.verified,
    ).to_wire()


def bare_document(status: Status) -> dict[str, Any]:
    """Conditions alone, for an object whose spec could not be read."""
    conditions = tuple(map(_to_wire, status.conditions))
    wire = PDClusterStatus(observed_generation=status.observed_generation, conditions=conditions).to_wire()
    return {name: wire[name] for name in ("observedGeneration", "conditions")}


def read_status(document: Object | None) -> Status | None:
    """The status that was written last, without fields that only another version of us knows.

    None: there is none, or it cannot be read. A proof that a newer operator wrote still counts when an older operator
    comes back."""
    if not document:
        return None
    try:
        wire, _ = PDClusterStatus.from_server(document)
    except ValidationError:
        return None
    conditions = tuple(_from_wire(one) for one in wire.conditions if _is_known(one))
    roles = wire.roles
    return Status(
        wire.observed_generation,
        wire.target or "",
        wire.verified_target or "",
        _role_from_wire(roles.prefill),
        _role_from_wire(roles.decode),
        conditions,
    )


def event_document(event: KubernetesEvent, about: View, identity: str, now: int, suffix: str) -> dict[str, Any]:
    """The Event as JSON. ``identity``: the replica that sends it. ``suffix`` makes the Event's name unique."""
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ref = about.ref
    name = f"{ref.name[: _MAX_NAME - len(suffix) - 1]}.{suffix}"
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": name, "namespace": ref.namespace},
        "involvedObject": {
            "apiVersion": ref.kind.api_version,
            "kind": ref.kind.name,
            "namespace": ref.namespace,
            "name": ref.name,
            "uid": about.uid,
        },
        "type": event.kind.value,
        "reason": event.reason,
        "message": event.message[:MAX_MESSAGE],
        "source": {"component": MANAGER, "host": identity},
        "reportingComponent": MANAGER,
        "reportingInstance": identity[:128],
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def _to_wire(condition: Condition) -> WireCondition:
    return WireCondition(
        type=condition.type.value,
        status=ConditionStatus(condition.truth.value),
        reason=condition.reason.value,
        message=condition.message,
        observed_generation=condition.observed_generation,
        last_transition_time=_time(condition.transition_s),
        last_update_time=None if condition.update_s is None else _time(condition.update_s),
    )


def _is_known(condition: WireCondition) -> bool:
    return condition.type in _TYPES and condition.reason in _REASONS


def _from_wire(condition: WireCondition) -> Condition:
    updated = condition.last_update_time
    return Condition(
        Type(condition.type),
        Truth(condition.status.value),
        Reason(condition.reason),
        condition.message,
        condition.observed_generation,
        int(condition.last_transition_time.timestamp()),
        None if updated is None else int(updated.timestamp()),
    )


def _role_to_wire(counts: Counts, tensor: int) -> RoleStatus:
    return RoleStatus(
        wanted=counts.wanted,
        replicas=counts.replicas,
        updated=counts.updated,
        ready=counts.ready,
        updated_ready=counts.updated_ready,
        terminating=counts.terminating,
        summary=summary_of(ready=counts.ready, wanted=counts.wanted, tensor=tensor),
    )


def _role_from_wire(role: RoleStatus) -> Counts:
    return Counts(
        wanted=role.wanted,
        replicas=role.replicas,
        updated=role.updated,
        ready=role.ready,
        updated_ready=role.updated_ready,
        terminating=role.terminating,
    )


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
