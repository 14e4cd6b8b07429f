"""The kinds of objects that the operator reads or writes, and where the API server keeps them. Data only.

A table rather than discovery: the operator needs no other kinds, and the chart's roles list the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from pdcluster_operator.api.base import API_VERSION
from pdcluster_protocol.labels import MANAGED_BY, MANAGER

Object = Mapping[str, Any]
"""One object as JSON, the API server's or a manifest of ours. Read-only."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind. ``plural``: its name in URLs and in the ``resources`` of a Kubernetes Role."""

    api_version: str
    name: str
    plural: str

    @property
    def group(self) -> str:
        """The API group; empty: the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    @property
    def root(self) -> str:
        """URL path of the group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Path of one object; without a name, of all objects of this kind in a namespace or (None) in the cluster."""
        within = f"/namespaces/{quote(namespace)}" if namespace else ""
        return "/".join(part for part in (f"{self.root}{within}/{self.plural}", quote(name), subresource) if part)


@dataclass(frozen=True, slots=True)
class Ref:
    """One object by name."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.namespace}/{self.name}"

    def path(self, subresource: str = "") -> str:
        return self.kind.path(self.namespace, self.name, subresource)


PDCLUSTER: Final = Kind(API_VERSION, "PDCluster", "pdclusters")
SCALER: Final = Kind(API_VERSION, "PDRoleScaler", "pdrolescalers")
DEPLOYMENT: Final = Kind("apps/v1", "Deployment", "deployments")
LEADER_WORKER_SET: Final = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
POD: Final = Kind("v1", "Pod", "pods")
SERVICE: Final = Kind("v1", "Service", "services")
SECRET: Final = Kind("v1", "Secret", "secrets")
SERVICE_ACCOUNT: Final = Kind("v1", "ServiceAccount", "serviceaccounts")
ROLE: Final = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING: Final = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
DISRUPTION_BUDGET: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY: Final = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
EVENT: Final = Kind("v1", "Event", "events")
LEASE: Final = Kind("coordination.k8s.io/v1", "Lease", "leases")

WORKLOADS: Final = (DEPLOYMENT, LEADER_WORKER_SET)
"""The kinds that run engines."""
WATCHED_CHILDREN: Final = (
    DEPLOYMENT,
    SERVICE,
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    SCALER,
)
"""Kinds of children that we watch and that every cluster with our CRDs knows. Secrets are not among them: a right to
list Secrets is a right to read them all."""

KINDS: Final = {
    (kind.api_version, kind.name): kind
    for kind in (PDCLUSTER, LEADER_WORKER_SET, POD, SECRET, EVENT, LEASE, *WATCHED_CHILDREN)
}


_OURS: Final = f"{MANAGED_BY}={MANAGER}"
"""Label selector of everything that the operator makes."""


def selector_of(kind: Kind) -> str:
    """Label selector of the objects of a kind that we watch: all PDClusters, and of other kinds those that we made."""
    return "" if kind == PDCLUSTER else _OURS


def kind_of(manifest: Object) -> Kind:
    """The kind of one object.

    Raises:
        KeyError: The operator does not know the kind: a bug of ours.
    """
    return KINDS[manifest["apiVersion"], manifest["kind"]]


def ref_of(manifest: Object) -> Ref:
    metadata = manifest["metadata"]
    return Ref(kind_of(manifest), metadata["namespace"], metadata["name"])
