"""A control plane with the chart's rights, a played node and played routers: where an operator's process is at home."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from chart_cases.rendering import NAMESPACE
from control_plane.accounts import make_namespace
from control_plane.audit import Record, end_of_records, read_records
from control_plane.binaries import find_binaries
from control_plane.kube_http import MERGE_PATCH, KubeHttp, Object
from control_plane.plane import ControlPlane
from integration.harness import eventually
from operator_cases.objects import pdcluster
from operator_on_server.chart import ACCOUNT, install_chart, operator_args
from operator_on_server.node import PlayedNode
from operator_on_server.process import OperatorProcess
from operator_on_server.routers import PlayedRouters

USER: Final = f"{NAMESPACE}:{ACCOUNT}"
READY_LIMIT_S: Final = 300.0
"""Each wait ends far below it; after many failures in a row the operator itself waits for up to a minute. Below the
600 s after which it looks at everything anew, so that this look does not stand in for one that it has missed."""
STILL_S: Final = 3.0
"""Before versions are compared: controllers write some statuses late."""
KINDS: Final = {
    "pdclusters": "/apis/pdcluster.dev/v1alpha1",
    "pdrolescalers": "/apis/pdcluster.dev/v1alpha1",
    "deployments": "/apis/apps/v1",
    "replicasets": "/apis/apps/v1",
    "pods": "/api/v1",
    "services": "/api/v1",
    "secrets": "/api/v1",
    "serviceaccounts": "/api/v1",
    "endpointslices": "/apis/discovery.k8s.io/v1",
    "roles": "/apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
}
"""Where the objects of a pool are."""


@dataclass
class Server:
    """One thread owns it: the one that made it."""

    plane: ControlPlane
    node: PlayedNode
    routers: PlayedRouters
    folder: Path
    case: str
    _num_started: int = field(default=0)

    @property
    def admin(self) -> KubeHttp:
        return self.plane.admin

    @contextmanager
    def operator(
        self, name: str = "a", *, url: str = "", more: Sequence[str] = (), is_on_a_laptop: bool = False
    ) -> Iterator[OperatorProcess]:
        """It starts; at the end it is killed, if it was not before. ``more``: flags."""
        self._num_started += 1
        args = [f"--router-port={self.routers.port}", *operator_args(self.case), *more]
        identity = f"{name}{self._num_started}"
        process = OperatorProcess(self.plane, self.folder, identity, args, url=url, is_on_a_laptop=is_on_a_laptop)
        try:
            yield process
        finally:
            process.kill()

    @contextmanager
    def pool(self, changes: Mapping[str, object] | None = None, namespace: str = "") -> Iterator[Pool]:
        """A new PDCluster in a namespace of its own; at the end it is deleted and nobody waits for that."""
        made_in = namespace or make_namespace(self.admin, "pool")
        body = pdcluster(
            {
                "metadata.namespace": made_in,
                "spec.router.replicas": 1,
                **(changes or {}),
            }
        )
        pool = Pool(self.admin, made_in, body["metadata"]["name"])
        self.admin.create(pool.list_path("pdclusters"), body)
        try:
            yield pool
        finally:
            self.admin.ask("DELETE", pool.path)

    def mark(self) -> int:
        """Where the audit log ends now."""
        return end_of_records(self.plane.audit_file)

    def records(self, since: int = 0) -> list[Record]:
        """What operators asked for since a mark."""
        return read_records(self.plane.audit_file, USER, since=since)

    def writes(self, since: int, by: OperatorProcess | None = None) -> list[Record]:
        """But for the Lease, which is written all the time. ``by``: one operator's alone."""
        found = [one for one in self.records(since) if one.is_write and one.right.resource != "leases"]
        return [one for one in found if by is None or one.token_id == by.token_id]


@dataclass(frozen=True)
class Pool:
    """One PDCluster, as its user sees it."""

    admin: KubeHttp
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.list_path('pdclusters')}/{self.name}"

    def list_path(self, plural: str) -> str:
        return f"{KINDS[plural]}/namespaces/{self.namespace}/{plural}"

    def all_of(self, plural: str) -> list[Object]:
        """Those of the pool alone: Kubernetes has some of its own in each namespace."""
        found: list[Object] = self.admin.get(self.list_path(plural))["items"]
        return [one for one in found if one["metadata"]["name"].startswith(self.name)]

    def read(self) -> Object:
        return self.admin.get(self.path)

    def merge(self, spec: Object) -> None:
        """The user changes the spec."""
        answer = self.admin.ask("PATCH", self.path, {"spec": spec}, content_type=MERGE_PATCH)
        assert not answer.complaints, answer

    def label(self, path: str, labels: Object) -> None:
        """Somebody labels an object of theirs."""
        answer = self.admin.ask("PATCH", path, {"metadata": {"labels": labels}}, content_type=MERGE_PATCH)
        assert not answer.complaints, answer

    def condition(self, kind: str) -> Object:
        """Empty: not told yet, or told for an older spec."""
        body = self.read()
        status = body.get("status") or {}
        if status.get("observedGeneration") != body["metadata"]["generation"]:
            return {}
        return next((one for one in status["conditions"] if one["type"] == kind), {})

    def is_ready(self) -> bool:
        """For what the spec says now, and nothing is under way."""
        is_done = self.condition("Progressing").get("reason") == "RolloutComplete"
        return is_done and self.condition("Ready").get("status") == "True"

    def wait_ready(self) -> None:
        """
        Raises:
            AssertionError: Not within ``READY_LIMIT_S``; says its status.
        """
        assert eventually(self.is_ready, timeout_s=READY_LIMIT_S, poll_s=0.1), self.read().get("status")

    def versions(self) -> dict[str, str]:
        """Every object of the pool, and its resourceVersion."""
        found = {f"{plural}/{one['metadata']['name']}": one for plural in KINDS for one in self.all_of(plural)}
        return {name: one["metadata"]["resourceVersion"] for name, one in found.items()}

    def wait_still(self, quiet_s: float = 1.0) -> dict[str, str]:
        """Nothing changes any more, nor will when a pod has ended that is ending now: the versions."""
        seen: list[dict[str, str]] = [self.versions()]

        def is_still() -> bool:
            seen.append(self.versions())
            return seen[-1] == seen[-2] and not self._num_ending()

        assert eventually(is_still, timeout_s=READY_LIMIT_S, poll_s=quiet_s), seen[-2:]
        return seen[-1]

    def _num_ending(self) -> int:
        """Pods, as the status says."""
        roles = self.read().get("status", {}).get("roles", {})
        return sum(role.get("terminating", 0) for role in roles.values())

    def engines(self, role: str) -> dict[str, int]:
        """Workloads of a role and the replicas that they are asked for."""
        found = [
            one for one in self.all_of("deployments") if one["metadata"]["labels"].get("pdcluster.dev/role") == role
        ]
        return {one["metadata"]["name"]: one["spec"]["replicas"] for one in found}

    def events(self) -> list[str]:
        found = self.admin.get(f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return [f"{one['type']} {one['reason']}: {one['message']}" for one in found]


@contextmanager
def running_server(
    folder: Path, *, case: str = "default", namespaces: tuple[str, ...] = (), admission: tuple[str, ...] = ()
) -> Iterator[Server]:
    """``folder``: empty. ``case``: of the chart's; ``namespaces``: those that it has rights in."""
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(find_binaries(os.environ), folder, admission=admission))
        install_chart(plane, case, [*namespaces])
        node = PlayedNode(plane.admin)
        stack.callback(node.close)
        routers = PlayedRouters(plane.admin)
        stack.callback(routers.close)
        yield Server(plane, node, routers, folder, case)
