"""The gauges of each PDCluster: its conditions, and how long it has not been ready though it should be.

They are made from statuses alone, so they end with the object. Labels are bounded: a namespace and a name for each
object, eight conditions, and for each condition the one truth that holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdcluster_operator.core.status.conditions import Reason, Status, Truth, Type


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The gauges of one PDCluster. ``conditions``: type and truth. ``not_ready_s``: see the function of this name."""

    namespace: str
    name: str
    conditions: tuple[tuple[str, str], ...]
    not_ready_s: int
    deadline_s: int


def sample_of(namespace: str, name: str, status: Status, deadline_s: int, now: int) -> PoolSample:
    """The gauges of one PDCluster. ``deadline_s``: its spec's progress deadline. ``now``: whole Unix seconds."""
    return PoolSample(namespace, name, tuple(_truths(status)), not_ready_s(status, now), deadline_s)


def not_ready_s(status: Status, now: int) -> int:
    """Seconds without being ready since the last progress; 0 for a pool that is ready, stopped, paused or refused.

    Each progress begins the count anew, so a rollout that moves is not late, however long it takes.
    """
    ready, progressing = status.condition(Type.READY), status.condition(Type.PROGRESSING)
    if ready is None or progressing is None or ready.truth is Truth.TRUE:
        return 0
    if progressing.truth is Truth.UNKNOWN or status.reason(Type.PREFILL_READY) is Reason.SCALED_TO_ZERO:
        return 0
    return max(0, now - max(ready.transition_s, progressing.update_s or 0))


def _truths(status: Status) -> Iterator[tuple[str, str]]:
    return ((one.type.value, one.truth.value) for one in status.conditions)
