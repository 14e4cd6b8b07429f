"""A revision's last prefill engine outlives its decode engines.

When both roles of a revision go at once, decode engines still hold requests that wait for their prompt's KV: minutes,
if they have no free blocks. The router asks a prefill engine of that revision for them as long as there is one, so the
last one gets its order to go only when no decode pod of the revision is left. The planner (``rollout.py``) asks for it
again and again until then, so nothing has to be remembered.

Keeping an engine never breaks a bound: the planner gives a place away only when its pod is gone.
"""

from __future__ import annotations

from dataclasses import replace

from pdcluster_operator.core.fleet import Fleet, Workload
from pdcluster_operator.core.rollout import Change
from pdcluster_protocol.labels import Role


def keep_last_prefill(fleet: Fleet, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes without those that would take a last, ready prefill engine from decode engines of its revision."""
    kept = {workload.name for revision in _revisions(fleet) for workload in _last_of(fleet, changes, revision)}
    amended = (replace(change, after=1) if change.workload in kept else change for change in changes)
    return tuple(change for change in amended if change.after != change.before)


def _revisions(fleet: Fleet) -> set[str]:
    return {workload.revision for workload in fleet.prefill.workloads}


def _last_of(fleet: Fleet, changes: tuple[Change, ...], revision: str) -> list[Workload]:
    """The workload that keeps one, if these changes take all: the one with most ready. One that is not ready helps
    nobody."""
    after = {change.workload: change.after for change in changes if change.role is Role.PREFILL}
    ours = [workload for workload in fleet.prefill.workloads if workload.revision == revision]
    if any(after.get(workload.name, workload.replicas) for workload in ours) or not _has_decode(fleet, revision):
        return []
    ready = [workload for workload in ours if workload.staying]
    return [max(ready, key=lambda workload: workload.staying)] if ready else []


def _has_decode(fleet: Fleet, revision: str) -> bool:
    return any(workload.occupied for workload in fleet.decode.workloads if workload.revision == revision)
