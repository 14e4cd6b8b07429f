"""Namespaces and ServiceAccounts for tests: somebody who may do this and no more."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

from control_plane.kube_http import KubeHttp, Object

RBAC = "rbac.authorization.k8s.io"


def make_namespace(admin: KubeHttp, prefix: str = "test") -> str:
    """The name of a new one; the controller manager fills and empties it."""
    metadata = {"name": f"{prefix}-{uuid4().hex[:8]}"}
    made = admin.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    return str(made["metadata"]["name"])


def make_account(admin: KubeHttp, namespace: str, name: str, rules: Sequence[Object]) -> None:
    """A ServiceAccount with a Role of its own: ``rules`` as in RBAC, within ``namespace`` only."""
    metadata = {"name": name, "namespace": namespace}
    admin.create(
        f"/api/v1/namespaces/{namespace}/serviceaccounts",
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
    )
    roles = f"/apis/{RBAC}/v1/namespaces/{namespace}"
    kind = {"apiVersion": f"{RBAC}/v1", "metadata": metadata}
    admin.create(f"{roles}/roles", {**kind, "kind": "Role", "rules": [*rules]})
    who = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    admin.create(f"{roles}/rolebindings", {**kind, "kind": "RoleBinding", "subjects": [who], "roleRef": role})
