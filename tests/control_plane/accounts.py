"""Namespaces and ServiceAccounts for tests: somebody who may do this and no more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from control_plane.kube_http import KubeHttp, Object

RBAC = "rbac.authorization.k8s.io"
RIGHTS_LIMIT_S: Final = 60.0


def make_namespace(admin: KubeHttp, prefix: str = "test") -> str:
    """The name of a new one; the controller manager fills and empties it."""
    metadata = {"name": f"{prefix}-{uuid4().hex[:8]}"}
    made = admin.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    return str(made["metadata"]["name"])


def make_account(admin: KubeHttp, namespace: str, name: str, rules: Sequence[Object]) -> None:
    """A ServiceAccount with a Role of its own: ``rules`` as in RBAC, within ``namespace`` only. They are in force.

    Raises:
        TimeoutError: The API server's authorizer does not know the first of them within ``RIGHTS_LIMIT_S``.
    """
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
    if rules:
        _wait_in_force(admin, namespace, name, rules[0])


def _wait_in_force(admin: KubeHttp, namespace: str, name: str, rule: Object) -> None:
    """The authorizer reads bindings by watches of its own, which may lag."""
    resource, _, subresource = rule["resources"][0].partition("/")
    asked = {"namespace": namespace, "group": rule["apiGroups"][0], "resource": resource, "subresource": subresource}
    user = f"system:serviceaccount:{namespace}:{name}"
    spec = {"user": user, "resourceAttributes": {**asked, "verb": rule["verbs"][0]}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    deadline = time.monotonic() + RIGHTS_LIMIT_S
    while not admin.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)["status"]["allowed"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{user} has no rights after {RIGHTS_LIMIT_S:g} s")
        time.sleep(0.05)
