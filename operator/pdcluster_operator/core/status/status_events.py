"""Events of a PDCluster, from two of its statuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdcluster_operator.core.status.conditions import Condition, Reason, Status, Truth, Type
from pdcluster_operator.core.status.pool_status import FAILURES

_ALARMING: Final = frozenset(
    {*FAILURES, Reason.REFUSED, Reason.TOO_FEW_READY, Reason.UNKNOWN_FIELDS, Reason.HELD_BY_GROUPS}
)
"""Their Events are warnings, and told as soon as they are there."""
_SUMS: Final = frozenset({Type.DEGRADED, Type.READY})
"""Conditions that sum up others, and may repeat the reason of another condition."""


class EventKind(Enum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class KubernetesEvent:
    """One Kubernetes Event to send."""

    kind: EventKind
    reason: str
    message: str


def events_between(before: Status | None, after: Status) -> tuple[KubernetesEvent, ...]:
    """Events for conditions whose truth or reason changed. A new number in a message is no Event, and neither is a new
    condition that is merely not True yet.

    A condition in ``_SUMS`` has no Event if another condition has an Event of the same reason: one fault, one Event.
    """
    news = [one for one in after.conditions if _is_news(one, before.condition(one.type) if before else None)]
    told = {one.reason for one in news if one.type not in _SUMS}
    return tuple(
        KubernetesEvent(_kind(one), one.reason.value, f"{one.type.value}: {one.message}")
        for one in news
        if one.type not in _SUMS or one.reason not in told
    )


def _is_news(condition: Condition, was: Condition | None) -> bool:
    if was is None:
        return condition.truth is Truth.TRUE or condition.reason in _ALARMING
    has_other_reason = condition.reason is not was.reason and condition.type not in _SUMS
    return condition.truth is not was.truth or has_other_reason


def _kind(condition: Condition) -> EventKind:
    return EventKind.WARNING if condition.reason in _ALARMING else EventKind.NORMAL
