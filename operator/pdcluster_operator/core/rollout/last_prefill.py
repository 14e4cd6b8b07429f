"""Keeps a revision's last prefill engine until its decode engines are gone.

When both roles of a revision go at once, decode engines still hold requests that wait for their prompt's KV: for
minutes, if they have no free blocks. The router needs a prefill engine of that revision for these requests. So the
revision's last prefill engine is told to go only when no decode pod of the revision is left. The planner (``steps.py``)
asks for the removal again in each look, so nothing has to be remembered.

A kept engine breaks no bound, for the planner gives a place away only when the pod in it is gone.
"""

from __future__ import annotations

from dataclasses import replace

from pdcluster_operator.core.rollout.fleet import Fleet, Workload
from pdcluster_operator.core.rollout.steps import Change


def keep_last_prefill(fleet: Fleet, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """``changes``, but each revision keeps one ready prefill engine while its decode engines leave."""
    last = [workload for revision in _revisions(fleet) for workload in _last_of(fleet, changes, revision)]
    kept = {workload.name: workload.least for workload in last}
    amended = (replace(change, after=kept.get(change.workload, change.after)) for change in changes)
    return tuple(change for change in amended if change.after != change.before)


def _revisions(fleet: Fleet) -> set[str]:
    return {workload.revision for workload in fleet.prefill.workloads}


def _last_of(fleet: Fleet, changes: tuple[Change, ...], revision: str) -> list[Workload]:
    """The workload that shall keep an instance: the revision's workload with most ready instances. Empty if the changes
    leave an instance anyway, if decode does not go, or if no instance is ready."""
    ours = [workload for workload in fleet.prefill.workloads if workload.revision == revision]
    if _asked(ours, changes) or not _is_decode_leaving(fleet, changes, revision):
        return []
    ready = [workload for workload in ours if workload.staying]
    return [max(ready, key=lambda workload: workload.staying)] if ready else []


def _is_decode_leaving(fleet: Fleet, changes: tuple[Change, ...], revision: str) -> bool:
    """Whether all decode instances of the revision were told to go and some are still there.

    If decode stays, no prefill engine is kept: then only prefill's template is replaced, and without surge the planner
    has to remove the last old engine before it adds a new one.
    """
    theirs = [workload for workload in fleet.decode.workloads if workload.revision == revision]
    return not _asked(theirs, changes) and any(workload.occupied for workload in theirs)


def _asked(workloads: list[Workload], changes: tuple[Change, ...]) -> int:
    """Replicas of these workloads after the changes."""
    after = {change.workload: change.after for change in changes}
    return sum(after.get(workload.name, workload.replicas) for workload in workloads)
