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


def keep_last_prefill(fleet: Fleet, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes without those that would take a last, ready prefill engine from decode engines of its revision."""
    kept = {workload.name for revision in _revisions(fleet) for workload in _last_of(fleet, changes, revision)}
    amended = (replace(change, after=1) if change.workload in kept else change for change in changes)
    return tuple(change for change in amended if change.after != change.before)


def _revisions(fleet: Fleet) -> set[str]:
    return {workload.revision for workload in fleet.prefill.workloads}


def _last_of(fleet: Fleet, changes: tuple[Change, ...], revision: str) -> list[Workload]:
    """The workload that keeps one, if these changes leave none: the one with most ready. One that is not ready is
    of no help."""
    ours = [workload for workload in fleet.prefill.workloads if workload.revision == revision]
    if _asked(ours, changes) or not _is_decode_leaving(fleet, changes, revision):
        return []
    ready = [workload for workload in ours if workload.staying]
    return [max(ready, key=lambda workload: workload.staying)] if ready else []


def _is_decode_leaving(fleet: Fleet, changes: tuple[Change, ...], revision: str) -> bool:
    """All of it was told to go, and some is still there. Decode that stays is no reason: then only a template of
    prefill is replaced, and without surge the planner has to take the last one first."""
    theirs = [workload for workload in fleet.decode.workloads if workload.revision == revision]
    return not _asked(theirs, changes) and any(workload.occupied for workload in theirs)


def _asked(workloads: list[Workload], changes: tuple[Change, ...]) -> int:
    """Replicas after the changes."""
    after = {change.workload: change.after for change in changes}
    return sum(after.get(workload.name, workload.replicas) for workload in workloads)
