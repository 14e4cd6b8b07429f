"""Plans the next change of replica numbers towards the target, from the fleet as it is now and nothing else.

Nothing is remembered: after a restart, in a rollback or with a third revision only the numbers differ. Words:

    cohort    old workloads that go together: both roles of an old revision; or, if a role changed only its template,
              the old templates of that role (their engines still pair with the target's)
    leave     to take a whole cohort away; before that the cohort keeps an instance of each of its roles
    orphan    a workload of an old revision whose other role is gone: its engines will never be paired again
    useful    a ready instance whose revision serves (has a ready instance of each role) or is the one that the spec
              asks for; an instance of the target itself is useful only when the target is verified

The planner looks for moves in this order. All moves that are possible now make one step:

    orphans go -> the target shrinks to wanted -> old ones go, useless first -> cohorts are left -> the target grows

The laws (tests/property/test_rollout.py):
  - the target grows only while all pods, terminating ones too, stay within wanted + surge;
  - useful instances go only while wanted - unavailable useful ones remain, but for ready groups of a target's
    LeaderWorkerSet that has more than wanted: those go at once. A useless instance goes only if wanted - unavailable
    instances would remain once all old ones got ready (as in a Deployment's clean-up of unhealthy replicas);
  - while an old revision is there, the two roles' shares (target's replicas / wanted) differ by one instance at most;
  - a cohort that serves is left only when the target is verified and ready, or has no room for its first instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pdcluster_operator.core.rollout.fleet import ROLES, Fleet, Workload
from pdcluster_protocol.labels import Role


@dataclass(frozen=True, slots=True)
class Change:
    """Set the replicas of one workload. ``before``: its replicas when this was decided."""

    role: Role
    workload: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Step:
    """Changes to apply now, in this order.

    If only some are applied, the bounds still hold, and the next plan finds the rest.
    """

    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class _Cohort:
    """Old workloads that are left together; ``roles``: one or both."""

    revision: str
    roles: tuple[Role, ...]

    def members(self, fleet: Fleet, role: Role) -> tuple[Workload, ...]:
        return tuple(old for old in fleet.of(role).old if old.revision == self.revision and old.replicas)


def next_step(fleet: Fleet) -> Step | None:
    """The next step; None: all is as wanted, or the planner waits for pods, a verification or a user."""
    if not fleet.prefill.wanted:
        return _step_between(fleet, _all_to_zero(fleet))
    # Scaling is no rollout: if nothing old is left, neither a pause nor a missed deadline stops it.
    if (fleet.is_paused or fleet.is_past_deadline) and any(fleet.old):
        return None
    return _step_between(fleet, _exhaust(fleet, lambda now: _next_move(now) or _next_move_when_stuck(now)))


def preview_steps(fleet: Fleet) -> Iterator[Step]:
    """All steps from here, if every pod gets ready, every removed pod goes, and the target can be verified."""
    seen = None
    while fleet != seen:
        seen = fleet
        while step := next_step(fleet):
            yield step
            fleet = fleet_after(fleet, step)
        fleet = replace(_caught_up(fleet), is_verified=True)


def fleet_after(fleet: Fleet, step: Step) -> Fleet:
    """The fleet just after the step was applied, when the cluster has done nothing yet."""
    for change in step.changes:
        fleet = fleet.asked(change.role, change.workload, change.after)
    return fleet


def _exhaust(fleet: Fleet, move: Callable[[Fleet], Fleet | None]) -> Fleet:
    while moved := move(fleet):
        fleet = moved
    return fleet


def _next_move(fleet: Fleet) -> Fleet | None:
    return (
        _drop_orphan(fleet)
        or _trim_target(fleet)
        or _lower_old(fleet)
        or _leave(fleet)
        or _grow(fleet, in_proportion=True)
    )


def _next_move_when_stuck(fleet: Fleet) -> Fleet | None:
    """A move that breaks a rule, if no other move is possible.

    Without surge a role may have no place for its first new instance: then a cohort that serves is left. If both roles
    changed only their templates, both cohorts are left at once, for one after the other would take twice as long. The
    last rule to break is proportion: if the role that is behind cannot grow, the other role grows first.
    """
    if moved := _leave_for_room(fleet):
        return moved
    awaits_proof = not fleet.is_verified and all(fleet.of(role).target.replicas for role in ROLES)
    return None if awaits_proof or not _is_settled(fleet, ROLES) else _grow(fleet, in_proportion=False)


def _drop_orphan(fleet: Fleet) -> Fleet | None:
    for role, old in fleet.old:
        if fleet.is_orphan(role, old):
            return fleet.asked(role, old.name, 0)
    return None


def _trim_target(fleet: Fleet) -> Fleet | None:
    for role in ROLES:
        target, wanted = fleet.of(role).target, fleet.of(role).wanted
        if target.replicas > wanted:
            return fleet.asked(role, target.name, wanted)
    return None


def _lower_old(fleet: Fleet) -> Fleet | None:
    """Lower an old workload by one instance, where its cohort keeps another instance of this role, and goes on serving
    if it does."""
    spare = [(role, old) for cohort in _cohorts(fleet) for role, old in _beyond_one(fleet, cohort)]
    for role, old in sorted(spare, key=lambda found: _loss(fleet, found[1])):
        lowered = fleet.asked(role, old.name, old.replicas - 1)
        ends_service = fleet.serves(old.revision) and not lowered.serves(old.revision)
        if not ends_service and _may_lower(fleet, role, {old: old.replicas - 1}):
            return lowered
    return None


def _leave(fleet: Fleet) -> Fleet | None:
    cohorts = _cohorts(fleet)
    is_proven = fleet.is_verified and all(fleet.of(role).target.staying for role in ROLES)
    # A cohort that cannot serve may go at once, as long as a cohort that can serve is kept for a rollback.
    is_safe = any(fleet.serves(cohort.revision) for cohort in cohorts)
    for cohort in cohorts:
        may_go = is_proven or (is_safe and not fleet.serves(cohort.revision))
        if may_go and (moved := _left(fleet, cohort)):
            return moved
    return None


def _leave_for_room(fleet: Fleet) -> Fleet | None:
    lacking = {role for role in ROLES if not fleet.of(role).target.replicas}
    for cohort in _cohorts(fleet):
        is_in_the_way = lacking.intersection(cohort.roles) and _is_settled(fleet, cohort.roles)
        if is_in_the_way and (moved := _left(fleet, cohort)):
            return moved
    return None


def _left(fleet: Fleet, cohort: _Cohort) -> Fleet | None:
    """The fleet without this cohort; None: one of the cohort's roles still needs its instances."""
    members = {role: cohort.members(fleet, role) for role in cohort.roles}
    if not all(_may_lower(fleet, role, dict.fromkeys(members[role], 0)) for role in cohort.roles):
        return None
    for role in cohort.roles:
        for old in members[role]:
            fleet = fleet.asked(role, old.name, 0)
    return fleet


def _grow(fleet: Fleet, *, in_proportion: bool) -> Fleet | None:
    """The fleet with one instance more of the target: of the role that is further behind or, if that role cannot grow,
    of the other role. None: neither role can grow."""
    for role in sorted(ROLES, key=lambda role: fleet.of(role).target.replicas / fleet.of(role).wanted):
        ours = fleet.of(role)
        if ours.target.replicas < ours.wanted and ours.room > 0 and (_keeps_pace(fleet, role) or not in_proportion):
            return fleet.asked(role, ours.target.name, ours.target.replicas + 1)
    return None


def _keeps_pace(fleet: Fleet, role: Role) -> bool:
    """Whether the role, with one more instance, stays within one instance of the other role's share.

    True also if all old workloads are of the target's revision: their engines still pair with the target's. Example:
    2P4D may be at 1/2 and 1/4 (differ by 1/4), not at 2/2 and 1/4 (3/4 > 1/2).
    """
    ours, theirs = fleet.of(role), fleet.of(role.other)
    ahead = (ours.target.replicas + 1) * theirs.wanted - theirs.target.replicas * ours.wanted
    return ahead <= max(ours.wanted, theirs.wanted) or all(old.revision == fleet.revision for _, old in fleet.old)


def _cohorts(fleet: Fleet) -> list[_Cohort]:
    """All cohorts. Cohorts that do not serve come first; otherwise the oldest come first."""
    keys = [
        _Cohort(old.revision, (role,) if old.revision == fleet.revision else ROLES)
        for role, old in fleet.old
        if not fleet.is_orphan(role, old)
    ]
    return sorted(dict.fromkeys(keys), key=lambda cohort: fleet.serves(cohort.revision))


def _beyond_one(fleet: Fleet, cohort: _Cohort) -> Iterator[tuple[Role, Workload]]:
    for role in cohort.roles:
        members = cohort.members(fleet, role)
        if sum(old.replicas for old in members) > 1:
            yield from ((role, old) for old in members)


def _may_lower(fleet: Fleet, role: Role, replicas: dict[Workload, int]) -> bool:
    """Whether this role can do with these replicas of old workloads: the module's second law."""
    ours = fleet.of(role)
    counted = _useful_target(fleet, role)
    others = [old for old in ours.old if not fleet.is_orphan(role, old)]
    useful = counted + sum(_useful_lost(fleet, old, 0) for old in others)
    lost = sum(_useful_lost(fleet, old, after) for old, after in replicas.items())
    # Instances that would remain if all old instances got ready, and no further instance of the target did.
    hoped = counted + sum(old.replicas for old in others) - sum(old.replicas - after for old, after in replicas.items())
    return hoped >= ours.floor and (not lost or useful - lost >= ours.floor)


def _useful_target(fleet: Fleet, role: Role) -> int:
    """The target's ready instances of this role that count as useful: none before the target is verified and serves.

    They count earlier if the target has no instance of the other role and no place for one: the other role gets a place
    only when old engines have gone.
    """
    theirs = fleet.of(role.other)
    is_awaited = theirs.target.replicas > 0 or theirs.room > 0
    is_proven = fleet.is_verified and fleet.serves(fleet.revision)
    return 0 if is_awaited and not is_proven else fleet.of(role).target.staying


def _useful_lost(fleet: Fleet, old: Workload, replicas: int) -> int:
    """Useful instances that go if this old workload gets ``replicas``."""
    # The target's revision counts even if it does not serve: its other role is on its way.
    is_useful = fleet.serves(old.revision) or old.revision == fleet.revision
    return old.staying - old.staying_at(replicas) if is_useful else 0


def _loss(fleet: Fleet, old: Workload) -> tuple[int, int]:
    """Sort key of workloads that could lose an instance. Those that lose no ready instance come first, then those that
    lose a useless one, then those that lose a useful one."""
    return _useful_lost(fleet, old, old.replicas - 1), old.staying - old.staying_at(old.replicas - 1)


def _is_settled(fleet: Fleet, roles: tuple[Role, ...]) -> bool:
    """Whether nothing is under way in these roles that could make another move possible.

    Old pods that are not ready do not count as under way, for they may never get ready.
    """
    workloads = [workload for role in roles for workload in fleet.of(role).workloads]
    is_still = all(not workload.terminating and workload.live <= workload.replicas for workload in workloads)
    return is_still and all(fleet.of(role).target.ready >= fleet.of(role).target.replicas for role in roles)


def _all_to_zero(fleet: Fleet) -> Fleet:
    for role in ROLES:
        for workload in fleet.of(role).workloads:
            fleet = fleet.asked(role, workload.name, 0)
    return fleet


def _caught_up(fleet: Fleet) -> Fleet:
    """The fleet when the cluster has done everything that was asked of it."""

    def settled(workload: Workload) -> Workload:
        groups = None if workload.ready_groups is None else tuple(range(workload.replicas))
        return replace(workload, live=workload.replicas, ready=workload.replicas, terminating=0, ready_groups=groups)

    prefill, decode = (
        replace(fleet.of(role), target=settled(fleet.of(role).target), old=tuple(map(settled, fleet.of(role).old)))
        for role in ROLES
    )
    return replace(fleet, prefill=prefill, decode=decode)


def _step_between(before: Fleet, after: Fleet) -> Step | None:
    """The changes from ``before`` to ``after``; None: there are none. Removals come first, to free places early."""
    changes = [
        Change(role, was.name, was.replicas, now.replicas)
        for role in ROLES
        for was, now in zip(before.of(role).workloads, after.of(role).workloads, strict=True)
        if was.replicas != now.replicas
    ]
    return Step(tuple(sorted(changes, key=lambda change: change.after > change.before))) if changes else None
