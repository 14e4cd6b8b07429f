"""Real Helm, a real API server: installed, upgraded, rolled back, removed, and what its rights are worth there.

``helm test`` needs a node: its script has tests of its own, and the cluster's tests run it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import pytest
import yaml

from chart_cases.rendering import CHART, NAMESPACE, RELEASE, ROOT, rights
from control_plane.accounts import make_account, make_namespace
from control_plane.binaries import find_binaries
from control_plane.crds import conditions_of
from control_plane.kube_http import KubeHttp, Object
from control_plane.plane import ControlPlane

pytestmark = pytest.mark.control_plane

RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
CRDS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POOLS: Final = "/apis/pdcluster.dev/v1alpha1/namespaces"
OPERATOR: Final = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/pdcluster-operator"
LIMIT_S: Final = 60.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One of its own, for CRDs that others have installed are not Helm's to take; its namespace takes restricted pods
    only."""
    with ControlPlane(find_binaries(os.environ), tmp_path_factory.mktemp("chart")) as found:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": NAMESPACE, "labels": labels}
        found.admin.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        yield found


@contextmanager
def helm_of(plane: ControlPlane, namespace: str = NAMESPACE) -> Iterator[helm.Config]:
    with helm.Config(kubeconfig_path=plane.kubeconfig_file, namespace=namespace) as config:
        yield config


@contextmanager
def installed(
    plane: ControlPlane,
    values: Object | None = None,
    name: str = RELEASE,
    chart: Path = CHART,
    namespace: str = NAMESPACE,
) -> Iterator[helm.Config]:
    with helm_of(plane, namespace) as config:
        config.install(chart, name, values or {}, timeout=60)
        try:
            yield config
        finally:
            config.uninstall(name, timeout=60, ignore_not_found=True)


def eventually(holds: Callable[[], object], what: str) -> None:
    """Controllers take their time.

    Raises:
        TimeoutError: It does not hold within ``LIMIT_S``.
    """
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


def wait_served(admin: KubeHttp) -> None:
    def is_served() -> bool:
        path = f"{CRDS}/pdclusters.pdcluster.dev"
        established = conditions_of(admin.get(path)).get("Established") == "True"
        return established and admin.ask("GET", f"{POOLS}/default/pdclusters").status == 200

    eventually(is_served, "the CRDs are not served")


def example(name: str) -> Object:
    found: Object = yaml.safe_load((ROOT / "examples" / name).read_text())
    return found


@pytest.fixture
def admin(plane: ControlPlane) -> Iterator[KubeHttp]:
    """No pool is left at the end. The CRDs stay from one test to the next, as they do from one release to the next."""
    yield plane.admin
    pools = f"{POOLS}/default/pdclusters"
    answer = plane.admin.ask("GET", pools)
    for pool in answer.body.get("items", []):
        plane.admin.delete(f"{pools}/{pool['metadata']['name']}")


def test_an_installation_makes_pods_that_the_strictest_policy_takes(plane: ControlPlane, admin: KubeHttp) -> None:
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    with installed(plane):
        eventually(lambda: len(admin.get(pods)["items"]) == 2, "no pods: see the ReplicaSet's events")
        for pod in admin.get(pods)["items"]:
            assert pod["spec"]["serviceAccountName"] == "pdcluster-operator"
    eventually(lambda: not admin.get(pods)["items"], "the pods do not go")


@pytest.mark.parametrize("name", sorted(file.name for file in (ROOT / "examples").iterdir()))
def test_an_example_is_accepted(plane: ControlPlane, admin: KubeHttp, name: str) -> None:
    with installed(plane):
        wait_served(admin)
        made = admin.create(f"{POOLS}/default/pdclusters", example(name))
        assert made["spec"]["rollout"]["maxSurge"] in (0, 1), "defaults were filled in"


def test_an_upgrade_upgrades_the_crds(plane: ControlPlane, admin: KubeHttp, tmp_path: Path) -> None:
    old = tmp_path / "pdcluster"
    shutil.copytree(CHART, old)
    file = old / "files" / "crds" / "pdcluster.dev_pdclusters.yaml"
    crd = yaml.safe_load(file.read_text())
    del crd["spec"]["versions"][0]["additionalPrinterColumns"]
    file.write_text(yaml.safe_dump(crd))

    def columns() -> list[str]:
        version = admin.get(f"{CRDS}/pdclusters.pdcluster.dev")["spec"]["versions"][0]
        return [column["name"] for column in version.get("additionalPrinterColumns", [])]

    with installed(plane, chart=old) as config:
        assert "URL" not in columns()
        config.upgrade(CHART, RELEASE, timeout=60)
        assert "URL" in columns()
        config.rollback(RELEASE, timeout=60)
        assert "URL" not in columns()


def test_an_upgrade_changes_the_operator_and_a_rollback_changes_it_back(plane: ControlPlane, admin: KubeHttp) -> None:
    def shape() -> tuple[int, str]:
        spec = admin.get(OPERATOR)["spec"]
        return spec["replicas"], spec["template"]["spec"]["containers"][0]["image"]

    with installed(plane) as config:
        first = shape()
        config.upgrade(CHART, RELEASE, {"replicas": 3, "image": {"tag": "2"}}, timeout=60)
        assert shape() == (3, "localhost/pdcluster/pdcluster:2")
        config.rollback(RELEASE, timeout=60)
        assert shape() == first == (2, "localhost/pdcluster/pdcluster:0.1.0")
        assert [entry["revision"] for entry in config.history(RELEASE)] == [1, 2, 3]


def test_a_release_that_goes_leaves_pools_and_nothing_else(plane: ControlPlane, admin: KubeHttp) -> None:
    lists = [
        f"{RBAC}/clusterroles",
        f"{RBAC}/clusterrolebindings",
        f"{RBAC}/roles",
        f"{RBAC}/rolebindings",
        "/api/v1/services",
        "/api/v1/serviceaccounts",
        "/api/v1/configmaps",
        "/api/v1/secrets",
        "/apis/apps/v1/deployments",
        "/apis/policy/v1/poddisruptionbudgets",
        "/apis/networking.k8s.io/v1/networkpolicies",
    ]

    def ours() -> list[str]:
        found = [admin.ask("GET", path, labelSelector="app.kubernetes.io/part-of=pdcluster").body for path in lists]
        return [item["metadata"]["name"] for some in found for item in some["items"]]

    values = {
        "podDisruptionBudget": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "dashboard": {"enabled": True},
    }
    with installed(plane, values) as config:
        wait_served(admin)
        admin.create(f"{POOLS}/default/pdclusters", example("cpu.yaml"))
        assert len(ours()) >= 10
        config.uninstall(RELEASE, timeout=60)
        eventually(lambda: not ours(), "something of the release is left")
        pools = admin.get(f"{POOLS}/default/pdclusters")["items"]
        assert [pool["metadata"]["name"] for pool in pools] == ["tiny"]
        config.install(CHART, RELEASE, {}, timeout=60)
        assert admin.get(f"{POOLS}/default/pdclusters")["items"] == pools, "a new release takes them up as they are"


def test_a_second_release_for_one_namespace_stands_beside_the_first(plane: ControlPlane, admin: KubeHttp) -> None:
    team = make_namespace(admin)
    second = {"namespaces": [team], "crds": {"enabled": False}, "rbac": {"aggregate": False}}
    first = {"namespaces": [NAMESPACE]}
    with installed(plane, first), installed(plane, second, name="team", namespace=team):
        assert admin.get(f"{RBAC}/namespaces/{team}/roles/team-pdcluster-operator")["rules"]
        assert admin.get(OPERATOR)["metadata"]["name"] == "pdcluster-operator"
        operator = plane.as_account(team, "team-pdcluster-operator")
        wait_served(admin)
        eventually(lambda: operator.ask("GET", f"{POOLS}/{team}/pdclusters").status == 200, "no right in its namespace")
        assert operator.ask("GET", f"{POOLS}/{NAMESPACE}/pdclusters").status == 403
        assert operator.ask("GET", "/apis/pdcluster.dev/v1alpha1/pdclusters").status == 403


def test_a_second_release_with_crds_is_refused_by_helm(plane: ControlPlane, admin: KubeHttp) -> None:
    team = make_namespace(admin)
    with installed(plane), helm_of(plane, team) as config:
        with pytest.raises(helm.HelmError, match=r"pdclusters\.pdcluster\.dev"):
            config.install(CHART, "team", {}, timeout=60)
        config.uninstall("team", ignore_not_found=True)


def may(user: KubeHttp, namespace: str, group: str, resource: str, verb: str, name: str = "") -> bool:
    """What the API server says to the user's own question."""
    kind, _, sub = resource.partition("/")
    asked = {"namespace": namespace, "group": group, "resource": kind, "subresource": sub, "verb": verb, "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    answer = user.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_the_operator_may_do_what_its_rights_say_and_list_no_secrets(plane: ControlPlane, admin: KubeHttp) -> None:
    with installed(plane):
        operator = plane.as_account(NAMESPACE, "pdcluster-operator")
        for part, namespace in (("watched", "default"), ("own", NAMESPACE)):
            for rule in rights()[part]:
                name = "pdcluster-operator" if "ofLease" in rule else ""
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        asked = partial(may, operator, namespace, rule["apiGroups"][0], resource, verb, name)
                        eventually(asked, f"may not {verb} {resource}")
        for verb in ("list", "watch", "delete"):
            assert not may(operator, "default", "", "secrets", verb)
        assert not may(operator, "default", "", "pods", "delete")
        assert not may(operator, "default", "coordination.k8s.io", "leases", "create")
        assert not may(operator, NAMESPACE, "coordination.k8s.io", "leases", "update", "somebody-elses")


def test_the_operator_can_give_routers_their_right_and_no_other(plane: ControlPlane, admin: KubeHttp) -> None:
    def role(name: str, resource: str, verbs: list[str]) -> Object:
        rule = {"apiGroups": ["discovery.k8s.io"], "resources": [resource], "verbs": verbs}
        metadata = {"name": name, "namespace": "default"}
        return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": [rule]}

    roles = f"{RBAC}/namespaces/default/roles"
    with installed(plane):
        operator = plane.as_account(NAMESPACE, "pdcluster-operator")
        right = role("chart-router", "endpointslices", ["list", "watch"])
        eventually(lambda: operator.ask("POST", roles, right, dryRun="All").status == 201, "refused its own right")
        wrong = role("chart-router", "endpointslices", ["list", "watch", "delete"])
        assert operator.ask("POST", roles, wrong, dryRun="All").status == 403


def person(plane: ControlPlane, namespace: str, role: str) -> KubeHttp:
    """Somebody who has one of Kubernetes' own roles in a namespace."""
    make_account(plane.admin, namespace, role, [])
    who = {"kind": "ServiceAccount", "name": role, "namespace": namespace}
    binding: dict[str, Any] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{role}-of-cluster", "namespace": namespace},
        "subjects": [who],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
    }
    plane.admin.create(f"{RBAC}/namespaces/{namespace}/rolebindings", binding)
    return plane.as_account(namespace, role)


def test_kubernetes_own_roles_know_pools_while_the_release_is_there(plane: ControlPlane, admin: KubeHttp) -> None:
    namespace = make_namespace(admin)
    viewer, editor = person(plane, namespace, "view"), person(plane, namespace, "edit")
    group = "pdcluster.dev"
    with installed(plane):
        eventually(lambda: may(editor, namespace, group, "pdclusters", "create"), "edit is not aggregated")
        eventually(lambda: may(viewer, namespace, group, "pdclusters", "list"), "view is not aggregated")
        eventually(lambda: may(editor, namespace, group, "pdclusters", "list"), "an editor does not view")
        eventually(lambda: may(editor, namespace, group, "pdrolescalers/scale", "patch"), "an editor does not scale")
        assert not may(viewer, namespace, group, "pdclusters", "create")
        assert not may(editor, namespace, group, "pdclusters/status", "patch")
    eventually(lambda: not may(editor, namespace, group, "pdclusters", "create"), "edit keeps what went")
