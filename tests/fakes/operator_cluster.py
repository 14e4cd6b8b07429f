"""A cluster in memory, for plans: it keeps what is applied, and its pods come and go when a test says so.

As the API server it counts a write only where something changes, gives each change a new resourceVersion, refuses what
was decided on an old one, and drops children with their PDCluster. It knows nothing of what a field means, except
``spec.replicas`` of a workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from operator_cases.objects import pdcluster
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.manifests.pool import Document, Pool, pool_of
from pdcluster_operator.core.plan.actions import Child, Move, Plan, Way
from pdcluster_operator.core.plan.pool_plan import plan_pool
from pdcluster_operator.core.seen.observed import (
    Observed,
    SeenScaler,
    SeenService,
    SeenWorkload,
    VerificationResult,
    Version,
)
from pdcluster_operator.core.status.pool_status import Verification
from pdcluster_operator.kinds import WORKLOADS, kind_of
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

SECRET = "a secret of 32 characters or more"
IMAGE = "pdcluster:1"


class Conflict(Exception):
    """What was decided on has changed meanwhile."""


class Died(Exception):
    """No write gets through any more: the API server refuses it, or the operator is dead."""


def make_cluster(changes: Mapping[str, object] | None = None) -> PDCluster:
    """The smallest PDCluster with some fields changed, as the API server hands it out."""
    served = {"metadata.uid": "uid-of-pool", "metadata.generation": 1}
    return PDCluster.from_wire(pdcluster({**served, **(changes or {})}))


def make_pool(changes: Mapping[str, object] | None = None) -> Pool:
    """The same, as its children need it."""
    return pool_of(make_cluster(changes), IMAGE)


@dataclass
class Pods:
    """Of one workload."""

    live: int = 0
    ready: int = 0
    terminating: int = 0
    ready_groups: tuple[int, ...] | None = None
    """Indexes of the ready groups; None: nobody tells them."""


@dataclass
class Stored:
    document: Document
    resource_version: int


@dataclass
class FakeCluster:
    """Children of one PDCluster. ``writes``: what changed anything, in words."""

    has_leader_worker_sets: bool = False
    routers_ready: int = 2
    ready_ports: frozenset[str] = frozenset()
    """Names of the ports of ready routers."""
    now: int = 1000
    writes: list[str] = field(default_factory=list)
    objects: dict[tuple[str, str], Stored] = field(default_factory=dict)
    pods: dict[str, Pods] = field(default_factory=dict)
    verifications: dict[str, VerificationResult] = field(default_factory=dict)
    plan: Plan | None = None
    """The last one whose status was written."""
    version: int = 0
    writes_left: int | None = None
    """So many more get through; the status is the last one of a plan. None: all."""

    def reconcile(self, cluster: PDCluster) -> Plan:
        """One plan, carried out; gives the plan."""
        plan = self.plan_for(cluster)
        self.act_on(plan)
        return plan

    def act_on(self, plan: Plan) -> None:
        """As a reconcile does with its plan.

        Raises:
            Died: No more writes get through.
        """
        if plan.facts.is_proof_void:
            self.verifications.clear()  # As the verifier forgets.
        self.carry_out(plan)

    def plan_for(self, cluster: PDCluster, observed: Observed | None = None) -> Plan:
        return plan_pool(pool_of(cluster, IMAGE), observed or self.observed(), secret_text=SECRET, now=self.now)

    def settle(self, cluster: PDCluster, rounds: int = 200) -> list[str]:
        """Reconcile and let all pods follow until nothing changes any more; gives all that was written."""
        begin = len(self.writes)
        for _ in range(rounds):
            before = len(self.writes), self.picture()
            plan = self.reconcile(cluster)
            if plan.to_verify:
                self.verify(plan)
            self.follow()
            self.now += 1
            is_due = plan.to_verify or plan.wake_after_s == 0
            if before == (len(self.writes), self.picture()) and not is_due:
                return self.writes[begin:]
        raise AssertionError(f"still moving after {rounds} rounds: {self.writes[-5:]}")

    def verify(self, plan: Plan) -> None:
        self.verifications[plan.facts.target] = VerificationResult(Verification.PASSED)

    def follow(self) -> None:
        """Every pod that is asked for gets ready, every one that is to go has gone."""
        for name, pods in self.pods.items():
            pods.live = pods.ready = self.replicas(name)
            pods.terminating = 0

    def let_go(self) -> None:
        """Pods above the number asked for are told to go, and take their time; no new one comes."""
        for name, pods in self.pods.items():
            surplus = max(pods.live - self.replicas(name), 0)
            pods.live -= surplus
            pods.terminating += surplus
            pods.ready = min(pods.ready, pods.live)

    def picture(self) -> dict[str, tuple[int, int, int]]:
        return {name: (pods.live, pods.ready, pods.terminating) for name, pods in self.pods.items()}

    def replicas(self, name: str) -> int:
        return int(self._workloads()[name].document["spec"]["replicas"])

    def names(self, kind: str) -> set[str]:
        return {name for stored_kind, name in self.objects if stored_kind == kind}

    def scale(self, role: Role, replicas: int) -> None:
        """Somebody moves a PDRoleScaler."""
        for stored in self._of_kind("PDRoleScaler").values():
            if stored.document["spec"]["role"] == role.value:
                stored.document = _with_replicas(stored.document, replicas)
                stored.resource_version = self._next_version()

    def carry_out(self, plan: Plan) -> None:
        for child in plan.children:
            self._bring_about(child)
        for move in plan.moves:
            self._move(move)
        for prune in plan.prunes:
            key = prune.kind.name, prune.name
            self._require_version(key, prune.version)
            self._spend()
            gone = self.objects.pop(key)
            assert gone.document["apiVersion"] == prune.kind.api_version
            self.pods.pop(prune.name, None)
            self.writes.append(f"delete {prune.kind.name} {prune.name}")
        if self.plan is None or self.plan.status != plan.status:
            self._spend()
        self.plan = plan

    def observed(self) -> Observed:
        return Observed(
            workloads=tuple(self._seen_workload(name, stored) for name, stored in self._workloads().items()),
            services=tuple(
                _seen_service(stored) for stored in self._of_kind("Service").values() if _is_engines(stored)
            ),
            scalers=tuple(_seen_scaler(stored) for stored in self._of_kind("PDRoleScaler").values()),
            has_secret=bool(self.names("Secret")),
            has_leader_worker_sets=self.has_leader_worker_sets,
            routers_ready=self.routers_ready,
            ready_ports=self.ready_ports,
            verifications=dict(self.verifications),
            status=self.plan.status if self.plan else None,
        )

    def _bring_about(self, child: Child) -> None:
        key = child.kind, child.name
        if child.version:
            self._require_version(key, child.version)
        there = self.objects.get(key)
        if there and (child.way is Way.CREATE or there.document == child.document):
            return
        self._spend()
        self.objects[key] = Stored(child.document, self._next_version())
        self.writes.append(f"{'apply' if there else 'make'} {child.kind} {child.name}")
        if labels.TEMPLATE in child.document["metadata"]["labels"]:
            self.pods.setdefault(child.name, Pods())

    def _move(self, move: Move) -> None:
        key = move.kind.name, move.change.workload
        self._require_version(key, move.version)
        stored = self.objects[key]
        assert stored.document["spec"]["replicas"] == move.change.before
        self._spend()
        stored.document = _with_replicas(stored.document, move.change.after)
        stored.resource_version = self._next_version()
        self.writes.append(f"{move.change.workload} {move.change.before} -> {move.change.after}")

    def _spend(self) -> None:
        """One write gets through, or none does any more."""
        if self.writes_left == 0:
            raise Died
        if self.writes_left is not None:
            self.writes_left -= 1

    def _require_version(self, key: tuple[str, str], version: Version) -> None:
        there = self.objects.get(key)
        is_same = there and version.uid == _uid(key) and version.resource_version in ("", str(there.resource_version))
        if not is_same:
            raise Conflict(f"{key}: decided on {version}, there is {there and there.resource_version}")

    def _seen_workload(self, name: str, stored: Stored) -> SeenWorkload:
        document, pods = stored.document, self.pods[name]
        found = document["metadata"]["labels"]
        kind = kind_of(document)
        return SeenWorkload(
            name=name,
            kind=kind,
            role=Role(found[labels.ROLE]),
            revision=found[labels.REVISION],
            template=found[labels.TEMPLATE],
            version=Version(_uid((kind.name, name)), str(stored.resource_version)),
            replicas=document["spec"]["replicas"],
            live=pods.live,
            ready=pods.ready,
            terminating=pods.terminating,
            ready_groups=pods.ready_groups,
        )

    def _workloads(self) -> dict[str, Stored]:
        kinds = (self._of_kind(kind.name) for kind in WORKLOADS)
        return {name: stored for found in kinds for name, stored in found.items() if name in self.pods}

    def _of_kind(self, kind: str) -> dict[str, Stored]:
        return {name: stored for (stored_kind, name), stored in self.objects.items() if stored_kind == kind}

    def _next_version(self) -> int:
        self.version += 1
        return self.version


def _uid(key: tuple[str, str]) -> str:
    return f"uid-of-{key[0]}-{key[1]}"


def _with_replicas(document: Document, replicas: int) -> Document:
    spec: dict[str, Any] = document["spec"]
    return {**document, "spec": {**spec, "replicas": replicas}}


def _is_engines(stored: Stored) -> bool:
    return labels.REVISION in stored.document["metadata"]["labels"]


def _seen_service(stored: Stored) -> SeenService:
    metadata = stored.document["metadata"]
    found = metadata["labels"]
    name, version = metadata["name"], str(stored.resource_version)
    return SeenService(
        name, Role(found[labels.ROLE]), found[labels.REVISION], Version(_uid(("Service", name)), version)
    )


def _seen_scaler(stored: Stored) -> SeenScaler:
    spec, name = stored.document["spec"], stored.document["metadata"]["name"]
    return SeenScaler(name, Role(spec["role"]), spec["replicas"], Version(_uid(("PDRoleScaler", name))))
