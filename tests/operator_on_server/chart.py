"""What the chart makes on an API server, without Helm: CRDs, ServiceAccount and rights, as it renders them."""

from __future__ import annotations

from typing import Final

from chart_cases.rendering import NAMESPACE, objects
from control_plane.crds import apply_crds, wait_established
from control_plane.kube_http import Object
from control_plane.plane import ControlPlane

ACCOUNT: Final = "pdcluster-operator"
_RIGHTS: Final = frozenset({"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"})


def install_chart(plane: ControlPlane, case: str, more: list[str]) -> None:
    """The chart's objects but for its Deployment, which is the process that a test starts.

    ``more``: namespaces that the case's rights are for.
    """
    apply_crds(plane.admin)
    wait_established(plane.admin)
    for name in [NAMESPACE, *more]:
        plane.admin.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    for one in objects(case):
        is_test = "helm.sh/hook" in (one["metadata"].get("annotations") or {})
        if one["kind"] in _RIGHTS and not is_test:
            plane.admin.create(path_of(one), one)


def operator_args(case: str) -> list[str]:
    """Of the container that the case's Deployment runs."""
    deployment = next(one for one in objects(case) if one["kind"] == "Deployment")
    args: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def path_of(one: Object) -> str:
    """Of all objects of its kind and namespace. For kinds whose plural is regular."""
    version, namespace = one["apiVersion"], one["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}{f'/namespaces/{namespace}' if namespace else ''}/{one['kind'].lower()}s"
