"""The rollout planner's input: the workloads of both roles as they are, and how many instances are wanted.

This file has only the numbers and their meaning. ``picture.py`` counts them.

A workload's pods, by what its Deployment and its pods say:

    replicas                     asked for (``spec.replicas``)
    live                         exist and are not terminating; differs from replicas while the cluster catches up
    ready   [part of live]       pass their readiness probe
    terminating                  were told to go and still hold their accelerators

Which pods go when ``replicas`` falls: of a Deployment those that are not ready, of a LeaderWorkerSet its last groups,
ready or not (LWS v0.9.0 ``leaderworkerset_controller.go``: the leaders are one StatefulSet).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from pdcluster_protocol.labels import Role

ROLES: Final = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Workload:
    """One (role, revision, template) and its pods. All numbers >= 0; ``ready <= live``.

    ``ready_groups``: of a LeaderWorkerSet, the indexes of its ready groups, from 0 and ascending, one for each of
    ``ready``; None: a Deployment.
    """

    name: str
    revision: str
    replicas: int = 0
    live: int = 0
    ready: int = 0
    terminating: int = 0
    ready_groups: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ready_groups is not None and len(self.ready_groups) != self.ready:
            raise ValueError(f"{self}: each ready group has one index")
        if min(self.replicas, self.live, self.ready, self.terminating) < 0 or self.ready > self.live:
            raise ValueError(f"{self}: numbers of pods are not negative, and no more are ready than live")

    @property
    def occupied(self) -> int:
        """Places that the workload's pods hold or will soon hold, with the places of terminating pods."""
        return max(self.replicas, self.live) + self.terminating

    @property
    def staying(self) -> int:
        """Ready instances that remain when the cluster has caught up."""
        return self.staying_at(self.replicas)

    @property
    def least(self) -> int:
        """The fewest replicas with which a ready instance remains. At least one is ready."""
        return 1 if self.ready_groups is None else self.ready_groups[0] + 1

    def staying_at(self, replicas: int) -> int:
        """Ready instances that remain if so many replicas are asked for."""
        if self.ready_groups is None:
            return min(self.ready, replicas)
        return sum(group < replicas for group in self.ready_groups)

    def asked(self, replicas: int) -> Workload:
        """This workload just after ``spec.replicas`` was changed, when the cluster has done nothing yet."""
        return replace(
            self, replicas=replicas, live=max(self.live, self.replicas) if replicas < self.replicas else self.live
        )


@dataclass(frozen=True, slots=True)
class RoleFleet:
    """All workloads of one role, and its bounds in instances. ``old``: those that the spec no longer asks for, oldest
    first."""

    target: Workload
    wanted: int
    surge: int
    unavailable: int
    old: tuple[Workload, ...] = ()

    def __post_init__(self) -> None:
        if min(self.wanted, self.surge, self.unavailable) < 0:
            raise ValueError(f"wanted {self.wanted}, surge {self.surge}, unavailable {self.unavailable}: below 0")
        if not self.surge and not self.unavailable:
            raise ValueError("surge 0 and unavailable 0: no instance could ever be replaced; raise one of them")

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return (self.target, *self.old)

    @property
    def floor(self) -> int:
        """The least number of ready instances that our own actions leave."""
        return max(self.wanted - self.unavailable, 0)

    @property
    def room(self) -> int:
        """Instances that may be added now; negative: there are too many."""
        return self.wanted + self.surge - sum(workload.occupied for workload in self.workloads)

    def asked(self, name: str, replicas: int) -> RoleFleet:
        """This role with other replicas of the workload of this name."""
        if name == self.target.name:
            return replace(self, target=self.target.asked(replicas))
        return replace(self, old=tuple(old.asked(replicas) if old.name == name else old for old in self.old))

    def asked_of(self, revision: str) -> int:
        """Replicas of all workloads of ``revision``."""
        return sum(workload.replicas for workload in self.workloads if workload.revision == revision)

    def staying_of(self, revision: str) -> int:
        """Ready instances of all workloads of ``revision`` that remain when the cluster has caught up."""
        return sum(workload.staying for workload in self.workloads if workload.revision == revision)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Both roles at one moment. ``is_verified``: a request was answered through the target's revision and templates."""

    prefill: RoleFleet
    decode: RoleFleet
    is_verified: bool = False
    is_paused: bool = False
    is_past_deadline: bool = False

    def __post_init__(self) -> None:
        if bool(self.prefill.wanted) != bool(self.decode.wanted):
            raise ValueError(
                f"{self.prefill.wanted} prefill and {self.decode.wanted} decode instances are wanted: ask for 0 of "
                "both, or of neither"
            )
        if self.prefill.target.revision != self.decode.target.revision:
            raise ValueError("the targets of both roles have one revision")

    @property
    def revision(self) -> str:
        """The target's revision."""
        return self.prefill.target.revision

    @property
    def old(self) -> Iterator[tuple[Role, Workload]]:
        """Old workloads that still ask for pods."""
        return ((role, old) for role in ROLES for old in self.of(role).old if old.replicas)

    def of(self, role: Role) -> RoleFleet:
        return self.prefill if role is Role.PREFILL else self.decode

    def asked(self, role: Role, name: str, replicas: int) -> Fleet:
        """This fleet with other replicas of one workload."""
        changed = self.of(role).asked(name, replicas)
        return replace(self, prefill=changed) if role is Role.PREFILL else replace(self, decode=changed)

    def serves(self, revision: str) -> bool:
        """Whether this revision can answer a request: each role has a ready instance that remains."""
        return all(self.of(role).staying_of(revision) for role in ROLES)

    def is_orphan(self, role: Role, workload: Workload) -> bool:
        """Whether the workload's engines will never be paired again: its revision is old, and no instance of the other
        role is asked for in that revision."""
        return workload.revision != self.revision and not self.of(role.other).asked_of(workload.revision)


def resolve_limits(max_surge: int | str, max_unavailable: int | str, wanted: int) -> tuple[int, int]:
    """(surge, unavailable) in instances. Percentages are of ``wanted``, and are rounded as in a Deployment.

    Surge rounds up, unavailable down. If both come out as 0, one instance may be unavailable (Kubernetes 1.35
    ``deploymentutil.ResolveFenceposts``). Example: 25 % and 25 % of 2 → surge 1, unavailable 0.

    Raises:
        ValueError: A limit is neither a number >= 0 nor a percentage, or both are 0 as written.
    """
    surge, unavailable = _hundredths(max_surge, wanted), _hundredths(max_unavailable, wanted)
    if not _amount(max_surge) and not _amount(max_unavailable):
        raise ValueError(f"maxSurge {max_surge} and maxUnavailable {max_unavailable}: one of them must be above 0")
    rounded = -(-surge // 100), unavailable // 100
    return rounded if any(rounded) else (0, 1)


def _hundredths(limit: int | str, wanted: int) -> int:
    """The limit in hundredths of an instance."""
    return _amount(limit) * (wanted if isinstance(limit, str) and limit.endswith("%") else 100)


def _amount(limit: int | str) -> int:
    digits = str(limit).removesuffix("%")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{limit!r} is neither a number of instances >= 0 nor a percentage such as 25%")
    return int(digits)
