"""What Helm makes of the chart: valid for Kubernetes, wired together, and with as few liberties as can be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from tools.crds import FOLDER as CRDS

from chart_cases.rendering import (
    CASES,
    CHART,
    EVERYTHING,
    NAMESPACE,
    RELEASE,
    chart,
    named,
    objects,
    objects_of,
    of_kind,
    pod_specs,
)
from chart_cases.rendering import rendered_files as files
from pdcluster_operator.__main__ import parse_settings

each_case = pytest.mark.parametrize("case", CASES)
KUBERNETES = "1.35"
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
OF_OTHERS = {"ServiceMonitor", "PrometheusRule"}
"""Kinds whose schema is not Kubernetes' own."""
NEVER_CHANGING = {f"app.kubernetes.io/{label}" for label in ("name", "instance", "component")}


@each_case
def test_a_strict_lint_finds_nothing(case: str) -> None:
    report = helm.lint(CHART, CASES[case], strict=True, namespace=NAMESPACE)
    assert report["errors"] == []
    assert [found["error"] for found in report["messages"]] == ["icon is recommended"]


@each_case
def test_kubernetes_takes_every_object(case: str) -> None:
    built_in = [found for found in objects(case) if found["kind"] not in OF_OTHERS]
    assert len(built_in) >= 2
    for found in built_in:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


@each_case
def test_no_object_is_there_twice_and_each_says_where_it_is(case: str) -> None:
    places = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects(case)]
    assert len(set(places)) == len(places)
    assert [place for place in places if (place[1] is None) != (place[0] in CLUSTER_WIDE)] == []


@each_case
def test_every_container_can_only_compute(case: str) -> None:
    specs = pod_specs(case)
    assert len(specs) == 2
    for spec in specs:
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec)
        assert [volume for volume in spec["volumes"] if "hostPath" in volume] == []
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["resources"]["limits"]["memory"]


@each_case
def test_a_selector_finds_the_operator_and_not_the_test(case: str) -> None:
    (operator,) = of_kind(case, "Deployment")
    labels = operator["spec"]["template"]["metadata"]["labels"]
    (service,) = of_kind(case, "Service")
    (check,) = of_kind(case, "Pod")
    selectors = [service["spec"]["selector"], operator["spec"]["selector"]["matchLabels"]]
    selectors += [found["spec"]["selector"]["matchLabels"] for found in of_kind(case, "PodDisruptionBudget")]
    selectors += [found["spec"]["podSelector"]["matchLabels"] for found in of_kind(case, "NetworkPolicy")]
    for selector in selectors:
        assert selector.keys() == NEVER_CHANGING, "an upgrade cannot change a Deployment's selector"
        assert selector.items() <= labels.items()
        assert not selector.items() <= check["metadata"]["labels"].items()


def test_a_users_label_never_breaks_a_selector() -> None:
    labels = of_kind("everything on", "Deployment")[0]["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "inference"
    assert labels["app.kubernetes.io/name"] == "pdcluster"


def operator(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pod and container."""
    (deployment,) = of_kind(case, "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


def test_the_operator_is_told_all_that_it_needs() -> None:
    spec, container = operator("default")
    assert container["command"] == ["pdcluster", "operator"]
    assert container["args"] == [
        "--lease-name=pdcluster-operator",
        f"--lease-namespace={NAMESPACE}",
        "--router-image=localhost/pdcluster/pdcluster:0.1.0",
        "--api-server-port=443",
        "--api-server-port=6443",
        "--port=8080",
    ]
    assert container["image"] == "localhost/pdcluster/pdcluster:0.1.0"
    assert of_kind("default", "Deployment")[0]["spec"]["replicas"] == 2
    assert spec["automountServiceAccountToken"] is True


@each_case
def test_the_operator_understands_what_it_is_told(case: str) -> None:
    _, container = operator(case)
    in_a_pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    settings = parse_settings(container["args"], in_a_pod, Path("/var/run/secrets/kubernetes.io/serviceaccount"))
    assert settings.namespaces == tuple(CASES[case].get("namespaces", ()))
    assert settings.lease_namespace == NAMESPACE
    assert settings.lease_name == of_kind(case, "Deployment")[0]["metadata"]["name"]
    assert settings.port == container["ports"][0]["containerPort"]
    assert settings.router_image == (CASES[case].get("routerImage") or container["image"])
    assert settings.kube_api == "https://10.96.0.1:443"


def test_namespaces_images_and_flags_reach_the_operator() -> None:
    spec, container = operator("namespaced")
    assert container["args"][:2] == ["--namespace=team-a", "--namespace=team-b"]
    assert container["args"][-1] == "--workers=4"
    assert "--router-image=mirror/pdcluster:2" in container["args"]
    assert container["image"] == "localhost/pdcluster/pdcluster@sha256:" + "a" * 64
    assert spec["imagePullSecrets"] == [{"name": "registry"}]


@each_case
def test_probes_and_services_meet_the_port_that_is_open(case: str) -> None:
    _, container = operator(case)
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]
    assert "--port=8080" in container["args"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
    (service,) = of_kind(case, "Service")
    assert service["spec"]["ports"] == [{"name": "http", "port": 8080, "targetPort": "http"}]
    (check,) = of_kind(case, "Pod")
    url = {item["name"]: item["value"] for item in check["spec"]["containers"][0]["env"]}["OPERATOR_URL"]
    assert url == f"http://{service['metadata']['name']}.{NAMESPACE}.svc:8080"


@pytest.mark.parametrize("file", sorted(CRDS.iterdir()), ids=lambda file: file.name)
def test_a_crd_is_the_repositorys_own_and_stays_when_the_release_goes(file: Any) -> None:
    made = yaml.safe_load(file.read_text())
    found = named("default", "CustomResourceDefinition", made["metadata"]["name"])
    assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert found["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
    assert found == made


def test_a_release_without_crds_has_none() -> None:
    assert len(of_kind("default", "CustomResourceDefinition")) == len(list(CRDS.iterdir()))
    assert of_kind("a second release", "CustomResourceDefinition") == []


def test_what_needs_other_peoples_kinds_is_off_unless_asked_for() -> None:
    optional = {"ServiceMonitor", "PrometheusRule", "PodDisruptionBudget", "NetworkPolicy"}
    assert {found["kind"] for found in objects("default")} & optional == set()
    assert {found["kind"] for found in objects("everything on")} >= optional
    assert [found for found in of_kind("default", "ConfigMap") if "dashboard" in found["metadata"]["name"]] == []


def test_everything_of_helm_test_goes_with_a_test_that_passed() -> None:
    hooks = [found for found in objects("default") if "helm.sh/hook" in found["metadata"].get("annotations", {})]
    assert {found["kind"] for found in hooks} == {"ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Pod"}
    for found in hooks:
        annotations = found["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "test"
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    (script,) = [found["data"]["check_install.py"] for found in hooks if found["kind"] == "ConfigMap"]
    assert script == (CHART / "files" / "check_install.py").read_text()


def test_the_operator_may_be_asked_by_the_test_where_only_prometheus_may() -> None:
    (policy,) = of_kind("everything on", "NetworkPolicy")
    (check,) = of_kind("everything on", "Pod")
    peers = policy["spec"]["ingress"][0]["from"]
    assert peers[0] == {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    assert peers[1]["podSelector"]["matchLabels"].items() <= check["metadata"]["labels"].items()


@each_case
def test_the_notes_name_the_next_steps(case: str) -> None:
    notes = files(case)["NOTES.txt"]
    (operator,) = of_kind(case, "Deployment")
    assert f"rollout status deployment/{operator['metadata']['name']}" in notes
    assert f"helm -n {NAMESPACE} test {RELEASE}" in notes
    assert "apply -f examples/cpu.yaml" in notes
    assert not re.search(r"\n{3}|%!|<no value>", notes)


def test_the_notes_say_what_was_turned_off() -> None:
    notes = files("a second release")["NOTES.txt"]
    assert "in the namespaces team-c" in notes
    assert "replicas is 0" in notes
    assert "ServiceAccount mine yourself" in notes
    assert "neither installs nor upgrades the CRDs" in notes
    assert "kubectl -n team-c apply" in notes


@pytest.mark.parametrize("release", ["a", "pdcluster", "r" * 53], ids=len)
def test_no_name_is_too_long_whatever_the_release_is_called(release: str) -> None:
    for text in chart().render({}, name=release, namespace=NAMESPACE).values():
        for name in re.findall(r'^  name: "?([^\s"]+)"?$', text, re.MULTILINE):
            assert len(name) <= 63, name
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name)


@pytest.mark.parametrize(
    ("release", "values"),
    [
        ("1pd", {}),
        ("1pd", {"fullnameOverride": "1pd"}),
        ("team.pd", {}),
        ("r" * 43 + "-" + "r" * 9, {}),
        ("x", {"fullnameOverride": "a" * 42 + "--bcd"}),
        ("1" * 53, {}),
        ("x", {"nameOverride": "a" * 40 + "------b"}),
    ],
)
def test_every_name_is_one_that_a_service_may_have(release: str, values: dict[str, Any]) -> None:
    for found in objects_of({**EVERYTHING, **values}, name=release, namespace=NAMESPACE):
        if found["kind"] != "CustomResourceDefinition":
            assert re.fullmatch(r"[a-z]([-a-z0-9]{,61}[a-z0-9])?", found["metadata"]["name"])
            kind_of_name = found["metadata"]["labels"]["app.kubernetes.io/name"]
            assert re.fullmatch(r"[a-z]([-a-z0-9.]*[a-z0-9])?", kind_of_name)


@pytest.mark.parametrize("name", ["123", "true", "null", "1e3", "0x1f", "2026-11-22"])
def test_a_name_that_looks_like_something_else_stays_a_name(name: str) -> None:
    values = {
        **EVERYTHING,
        "crds": {"enabled": False},
        "nameOverride": name,
        "fullnameOverride": name,
        "namespaces": [name],
        "image": {"pullSecrets": [name]},
        "routerImage": name,
        "serviceAccount": {"name": name},
        "priorityClassName": name,
    }
    for found in objects_of(values, name=name, namespace=name):
        metadata = found["metadata"]
        assert metadata.get("namespace", name) == name
        assert {type(text) for text in (metadata["name"], *metadata["labels"].values())} == {str}
        if found["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(found, KUBERNETES, strict=True)


def test_the_chart_and_the_package_have_one_version() -> None:
    pyproject = (CHART.parents[1] / "pyproject.toml").read_text()
    version = chart().metadata["appVersion"]
    assert f'\nversion = "{version}"\n' in pyproject
    assert chart().version == version
