"""The common parts of all children of one PDCluster: owner, labels by which they are found, limits of containers.

Selectors name only labels that a pod keeps for its whole life: cluster, role, revision, template, component.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdcluster_operator.api.cluster import PDCluster, PDClusterSpec
from pdcluster_operator.api.role import Resources, RoleSpec
from pdcluster_operator.core import names
from pdcluster_operator.kinds import PDCLUSTER, Kind
from pdcluster_protocol import labels, launch
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role

Document = dict[str, Any]
"""An object, or a part of one, as the API server takes it. Never changed after it was made."""

HTTP: Final = "http"
"""Name of the port on which engines and routers answer. Routers look for this name in EndpointSlices."""
PORT: Final = launch.HTTP_PORT
"""Number of the port ``HTTP``, the same in every pod. No side channel may use it. Two pods have the port at one address
only if overrides put both pods on the network of one node."""
INTERNAL: Final = "internal"
"""Name of a router's second port, for engines' callbacks, the operator's orders, metrics and pages."""
INTERNAL_PORT: Final = launch.INTERNAL_PORT
"""Number of the internal port. The port is not for clients, and the clients' Service does not lead to it."""
ROUTER: Final = "router"
"""Value of the routers' component label, and name of the router's container."""
ENGINE: Final = "engine"
"""Name of an engine's container."""
SECRET_KEY: Final = "secret"  # noqa: S105  # the name of a key
API_SERVER_PORTS: Final = (443, 6443)
"""Ports of the API server: its Service's, and that of most servers behind it. Which of the two a policy sees depends on
the network plugin. The API server is no pod, so a policy can name only its port."""
USER_ID: Final = 10001
"""A user id that belongs to no user on a node: above 10,000, as scanners of manifests want."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One PDCluster as its children need it. ``router_image``: the operator's own, which holds the router too.
    ``operator_namespace``: operators in it may reach the routers' internal port; empty: operators anywhere may.
    ``api_server_ports``: ports by which its routers reach the API server; at least one, for none would mean all."""

    name: str
    namespace: str
    uid: str
    spec: PDClusterSpec
    router_image: str
    api_server_ports: tuple[int, ...] = API_SERVER_PORTS
    operator_namespace: str = ""
    generation: int = 0

    def role(self, role: Role) -> RoleSpec:
        return self.spec.roles.prefill if role is Role.PREFILL else self.spec.roles.decode

    @property
    def label(self) -> str:
        """Value of the cluster's label."""
        return names.cluster_label(self.name)


def pool_of(
    cluster: PDCluster,
    router_image: str,
    api_server_ports: tuple[int, ...] = API_SERVER_PORTS,
    operator_namespace: str = "",
) -> Pool:
    """The pool of a PDCluster. A file may leave the namespace out, as kubectl allows: then it is ``default``."""
    found: Mapping[str, Any] = cluster.metadata
    return Pool(
        found["name"],
        found.get("namespace", "default"),
        str(found.get("uid", "")),
        cluster.spec,
        router_image,
        api_server_ports,
        operator_namespace,
        int(found.get("generation", 0)),
    )


def make_object(kind: Kind, metadata: Document, **fields: object) -> Document:
    """A whole object; ``fields``: its other top-level fields."""
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **fields}


def metadata_of(pool: Pool, name: str, component: str, extra: Mapping[str, str] | None = None) -> Document:
    """Metadata of a child. The PDCluster is its controller, so the child goes when the PDCluster goes."""
    return {
        "name": name,
        "namespace": pool.namespace,
        "labels": {**common_labels(pool, component), **(extra or {})},
        "ownerReferences": [owner_of(pool)],
    }


def owner_of(pool: Pool) -> Document:
    return {
        "apiVersion": PDCLUSTER.api_version,
        "kind": PDCLUSTER.name,
        "name": pool.name,
        "uid": pool.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def common_labels(pool: Pool, component: str) -> dict[str, str]:
    """Kubernetes' recommended labels, and ours."""
    return {
        labels.NAME: labels.APP_NAME,
        labels.INSTANCE: pool.label,
        labels.COMPONENT: component,
        labels.PART_OF: labels.APP_NAME,
        labels.MANAGED_BY: labels.MANAGER,
        labels.CLUSTER: pool.label,
    }


def role_labels(role: Role, revision: str = "", template: str = "") -> dict[str, str]:
    """Labels that tell engines apart, without empty ones."""
    found = {labels.ROLE: role.value, labels.REVISION: revision, labels.TEMPLATE: template}
    return {name: value for name, value in found.items() if value}


def engine_selector(pool: Pool, role: Role, revision: str = "", template: str = "") -> dict[str, str]:
    """``matchLabels`` of one role's engines. If ``revision`` or ``template`` is empty, engines of any match."""
    return {labels.CLUSTER: pool.label, **role_labels(role, revision, template)}


def router_selector(pool: Pool) -> dict[str, str]:
    """``matchLabels`` of the routers."""
    return {labels.CLUSTER: pool.label, labels.COMPONENT: ROUTER}


def internal_name(pool: Pool) -> str:
    """Name of the Service that leads to the routers' internal port."""
    return names.child_name(pool.name, f"{ROUTER}-{INTERNAL}")


def secret_ref(pool: Pool) -> Document:
    """Name of the Secret that holds the pool's secret, and the key in it: the user's Secret, if given, or ours."""
    named = pool.spec.auth.secret_ref
    if named is not None:
        return {"name": named.name, "key": named.key}
    return {"name": names.child_name(pool.name, SECRET_KEY), "key": SECRET_KEY}


def pod_security(*, locks_memory: bool = False) -> Document:
    """Security context of a pod, by the profile "restricted" of Kubernetes' Pod Security Standards. It names the user
    by number, because images of engines name either no user or root.

    ``locks_memory``: the user is root, and ``container_security`` adds one capability. RDMA pins all KV, but without
    that capability containers may lock only a few MiB. In Kubernetes a capability works for root alone: no ambient
    capabilities are set, and a file's capabilities do not count where privileges may not grow (each tried on a kernel).
    """
    user = 0 if locks_memory else USER_ID
    return {
        "runAsNonRoot": not locks_memory,
        "runAsUser": user,
        "runAsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


LAST_WORDS: Final = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""Fields of every container: if it dies, the pod's status has the last lines of its log."""


def container_security(*, locks_memory: bool = False) -> Document:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if locks_memory else {})},
    }


def labelled(template: Mapping[str, Any], extra: Mapping[str, str]) -> Document:
    """The template with more labels.

    Raises:
        ConfigError: In the user's overrides ``metadata``, or its ``labels``, is no map.
    """
    metadata = _map_in(template, "metadata")
    return {**template, "metadata": {**metadata, "labels": {**_map_in(metadata, "labels"), **extra}}}


def _map_in(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"podOverrides makes {name} {json.dumps(found)}: give a map")
    return found


def resources_of(resources: Resources, requests: Mapping[str, str]) -> Document:
    """A container's ``resources``. All amounts are text, as the API server itself writes them.

    ``requests``: for resources of which the user gives neither a request nor a limit (a limit is a request too). A pod
    without any request is BestEffort, however many devices it has: it is evicted first, and has the least CPU weight.
    """
    ours = {name: amount for name, amount in requests.items() if name not in resources.limits}
    found = {"requests": {**ours, **resources.requests}, "limits": resources.limits}
    return {kind: {name: str(amount) for name, amount in given.items()} for kind, given in found.items() if given}


def field_env(name: str, path: str) -> Document:
    """A variable with a field of the pod as its value."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def scratch_volume(name: str) -> Document:
    """A folder that lives as long as its pod."""
    return {"name": name, "emptyDir": {}}
