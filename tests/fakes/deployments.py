"""Deployments or LeaderWorkerSets of two roles, with pods that take their time: what the planner sees and changes.

As the real ones: a change of replicas is taken up a tick later, pods that are not ready are removed first, a removed
pod holds its place until it is gone, an engine that died starts again in its pod. A LeaderWorkerSet removes its last
groups, ready or not, and makes no group before the one of the same index is gone. The test says how long each takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pdcluster_operator.core.rollout.fleet import ROLES, Fleet, RoleFleet, Workload, resolve_limits
from pdcluster_operator.core.rollout.steps import Step
from pdcluster_protocol.labels import Role

NEVER: Final = 10**9


@dataclass(frozen=True, slots=True)
class Ask:
    """What a user wants from some moment on: a revision, each role's template, how many, and the limits."""

    revision: str
    prefill: int
    decode: int
    surge: int | str = 0
    unavailable: int | str = 1
    prefill_template: str = "t"
    decode_template: str = "t"
    is_broken: bool = False
    """Pods of this revision never get ready."""

    def wanted(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode

    def name(self, role: Role) -> str:
        template = self.prefill_template if role is Role.PREFILL else self.decode_template
        return f"{role.value}-{self.revision}-{template}"


@dataclass(slots=True)
class Pod:
    """Of a group, its leader. ``group``: its index."""

    ready_at: int
    group: int
    gone_at: int | None = None


@dataclass(slots=True)
class Deployment:
    role: Role
    revision: str
    is_broken: bool
    replicas: int = 0
    pods: list[Pod] = field(default_factory=list)


@dataclass(slots=True)
class FakeDeployments:
    """One owner: the test. ``start_ticks`` and ``stop_ticks`` are asked once for each pod that starts or stops."""

    ask: Ask
    start_ticks: Callable[[], int] = lambda: 1
    stop_ticks: Callable[[], int] = lambda: 1
    have_groups: bool = False
    """Whether all are LeaderWorkerSets."""
    now: int = 0
    verified: set[tuple[str, str]] = field(default_factory=set)
    all: dict[str, Deployment] = field(default_factory=dict)

    def settle(self) -> None:
        """As if the present ask had been reached long ago."""
        self.want(self.ask)
        for role in ROLES:
            deployment = self.all[self.ask.name(role)]
            deployment.replicas = self.ask.wanted(role)
            ready_at = NEVER if deployment.is_broken else self.now
            deployment.pods = [Pod(ready_at, group) for group in range(deployment.replicas)]
        self.verify()

    def want(self, ask: Ask) -> None:
        self.ask = ask
        for role in ROLES:
            self.all.setdefault(ask.name(role), Deployment(role, ask.revision, ask.is_broken))

    def apply(self, step: Step, num_changes: int | None = None) -> None:
        """Carry out a step, or only its first changes: the operator was killed then."""
        for change in step.changes[:num_changes]:
            deployment = self.all[change.workload]
            assert (deployment.role, deployment.replicas) == (change.role, change.before)
            deployment.replicas = change.after

    def tick(self) -> None:
        self.now += 1
        for deployment in self.all.values():
            deployment.pods = [pod for pod in deployment.pods if pod.gone_at is None or pod.gone_at > self.now]
            self._follow(deployment)

    def kill(self, name: str) -> None:
        """A ready engine of this workload dies and starts again in its pod."""
        for pod in self._live(self.all[name]):
            if pod.ready_at <= self.now:
                pod.ready_at = self.now + 1 + self.start_ticks()
                return

    def verify(self) -> None:
        """A request is sent through the target, and answered if there is a ready one of each role."""
        target = [self.workload(self.ask.name(role)) for role in ROLES]
        if all(workload.ready for workload in target):
            self.verified.add((target[0].name, target[1].name))

    def fleet(self, *, is_paused: bool = False, is_past_deadline: bool = False) -> Fleet:
        prefill, decode = (self._role(role) for role in ROLES)
        is_verified = (prefill.target.name, decode.target.name) in self.verified
        return Fleet(prefill, decode, is_verified, is_paused, is_past_deadline)

    def workload(self, name: str) -> Workload:
        deployment = self.all[name]
        live = self._live(deployment)
        ready = sorted(pod.group for pod in live if pod.ready_at <= self.now)
        terminating = len(deployment.pods) - len(live)
        groups = tuple(ready) if self.have_groups else None
        return Workload(name, deployment.revision, deployment.replicas, len(live), len(ready), terminating, groups)

    def is_done(self) -> bool:
        """All that is wanted is there and ready, and nothing else."""
        wanted = {self.ask.name(role): self.ask.wanted(role) for role in ROLES}
        seen = {name: self.workload(name) for name in self.all}
        return all(
            (seen[name].replicas, seen[name].ready, len(self.all[name].pods)) == (wanted.get(name, 0),) * 3
            for name in seen
        )

    def _role(self, role: Role) -> RoleFleet:
        target = self.ask.name(role)
        old = tuple(self.workload(name) for name, one in self.all.items() if one.role is role and name != target)
        limits = resolve_limits(self.ask.surge, self.ask.unavailable, self.ask.wanted(role))
        return RoleFleet(self.workload(target), self.ask.wanted(role), *limits, old)

    def _follow(self, deployment: Deployment) -> None:
        """Make or remove pods until there are as many as asked for."""
        live = sorted(self._live(deployment), key=lambda pod: -pod.ready_at)
        surplus = live[: max(len(live) - deployment.replicas, 0)]
        beyond = [pod for pod in live if pod.group >= deployment.replicas]
        for pod in beyond if self.have_groups else surplus:
            pod.gone_at = self.now + self.stop_ticks()
        taken = {pod.group for pod in deployment.pods}
        free = [group for group in range(deployment.replicas) if group not in taken]
        num_missing = deployment.replicas - len(live)
        for group in free if self.have_groups else range(num_missing):
            deployment.pods.append(Pod(NEVER if deployment.is_broken else self.now + self.start_ticks(), group))

    @staticmethod
    def _live(deployment: Deployment) -> list[Pod]:
        return [pod for pod in deployment.pods if pod.gone_at is None]
