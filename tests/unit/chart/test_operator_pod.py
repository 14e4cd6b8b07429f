"""How the operator is kept running and whom it may reach, and what the pod of ``helm test`` may do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_cases.rendering import CASES, CHART, NAMESPACE, RELEASE, chart, named, of_kind
from operator_cases.objects import pdcluster
from pdcluster_operator.__main__ import parse_settings
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.manifests.pool import pool_of
from pdcluster_operator.core.manifests.router import router_deployment
from pdcluster_operator.settings import Settings

each_case = pytest.mark.parametrize("case", CASES)
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
LONGEST_STEP_S = Settings.model_fields["call_timeout_s"].default
"""A call that the operator has begun when it is told to stop."""


def operator(case: str) -> dict[str, Any]:
    """The Deployment's spec."""
    (deployment,) = of_kind(case, "Deployment")
    found: dict[str, Any] = deployment["spec"]
    return found


def egress(case: str) -> list[dict[str, Any]]:
    (policy,) = of_kind(case, "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    found: list[dict[str, Any]] = policy["spec"]["egress"]
    return found


def ports(*numbers: int, protocol: str = "TCP") -> list[dict[str, Any]]:
    return [{"port": number, "protocol": protocol} for number in numbers]


class TestRunning:
    @each_case
    def test_ready_means_that_it_has_seen_the_cluster_and_alive_only_that_it_does_not_hang(self, case: str) -> None:
        (container,) = operator(case)["template"]["spec"]["containers"]
        paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
        assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}

    @each_case
    def test_the_first_lists_of_a_large_cluster_have_two_minutes_before_a_restart(self, case: str) -> None:
        probe = operator(case)["template"]["spec"]["containers"][0]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 120

    @each_case
    def test_a_slow_moment_is_no_reason_for_a_restart(self, case: str) -> None:
        probe = operator(case)["template"]["spec"]["containers"][0]["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 30
        assert probe["timeoutSeconds"] >= 5

    @each_case
    def test_a_new_one_is_ready_before_an_old_one_goes(self, case: str) -> None:
        rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        assert operator(case)["strategy"] == rolling

    @each_case
    def test_one_that_goes_has_time_to_end_a_call_and_to_give_the_lease_back(self, case: str) -> None:
        assert operator(case)["template"]["spec"]["terminationGracePeriodSeconds"] >= 2 * LONGEST_STEP_S

    @each_case
    def test_what_it_writes_goes_to_a_folder_of_its_own_with_a_bound(self, case: str) -> None:
        spec = operator(case)["template"]["spec"]
        assert spec["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}]
        assert spec["containers"][0]["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]

    @each_case
    def test_operators_are_spread_over_nodes_and_one_node_is_no_reason_to_wait(self, case: str) -> None:
        (term,) = operator(case)["template"]["spec"]["topologySpreadConstraints"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert (term["maxSkew"], term["whenUnsatisfiable"]) == (1, "ScheduleAnyway")
        assert term["labelSelector"] == operator(case)["selector"]

    def test_a_budget_never_keeps_a_node_for_ever(self) -> None:
        (budget,) = of_kind("everything on", "PodDisruptionBudget")
        assert budget["spec"] == {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": operator("everything on")["selector"],
        }


class TestReach:
    def test_names_can_be_asked_for_both_ways(self) -> None:
        assert {"ports": ports(53, protocol="UDP") + ports(53)} in egress("everything on")

    def test_the_api_server_is_reached_by_its_ports_and_nothing_else_is_without_a_selector(self) -> None:
        open_to_all = [rule for rule in egress("everything on") if "to" not in rule]
        assert [rule["ports"] for rule in open_to_all if rule["ports"][0]["port"] != 53] == [ports(443, 6443)]
        assert all(rule["ports"] for rule in open_to_all), "no ports would be all ports"

    def test_routers_are_reached_by_the_labels_that_the_operator_gives_them_in_any_namespace(self) -> None:
        ((peer,),) = [rule["to"] for rule in egress("everything on") if "to" in rule]
        pool = pool_of(PDCluster.from_wire(pdcluster({})), "router:1")
        labels = router_deployment(pool)["spec"]["template"]["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()
        assert peer["namespaceSelector"] == {}
        own = operator("everything on")["template"]["metadata"]["labels"]
        assert not peer["podSelector"]["matchLabels"].items() <= own.items()

    def test_probes_and_metrics_come_by_the_port_that_is_open(self) -> None:
        (policy,) = of_kind("everything on", "NetworkPolicy")
        (rule,) = policy["spec"]["ingress"]
        assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]

    @pytest.mark.parametrize("enabled", [False, True])
    def test_ports_of_the_api_server_reach_the_operator_whose_routers_need_them(self, enabled: bool) -> None:
        values = {"networkPolicy": {"enabled": enabled, "apiServerPorts": [443, 16443]}}
        files = chart().render(values, name=RELEASE, namespace=NAMESPACE)
        deployment = yaml.safe_load(files["pdcluster/templates/deployment.yaml"])
        args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        assert parse_settings(args, IN_A_POD, Path("/nowhere")).api_server_ports == (443, 16443)
        policy = yaml.safe_load(files.get("pdcluster/templates/networkpolicy.yaml", "")) or {}
        own = [rule["ports"] for rule in policy.get("spec", {}).get("egress", []) if "to" not in rule]
        assert (ports(443, 16443) in own) is enabled


class TestCheck:
    @each_case
    def test_it_shows_the_api_server_who_it_is_and_may_list_both_kinds_and_no_more(self, case: str) -> None:
        (pod,) = of_kind(case, "Pod")
        name = pod["metadata"]["name"]
        spec = pod["spec"]
        assert (spec["automountServiceAccountToken"], spec["serviceAccountName"]) == (True, name)
        assert named(case, "ServiceAccount", name)["automountServiceAccountToken"] is False
        resources = ["pdclusters", "pdrolescalers"]
        assert named(case, "Role", name)["rules"] == [
            {"apiGroups": ["pdcluster.dev"], "resources": resources, "verbs": ["list"]}
        ]
        binding = named(case, "RoleBinding", name)
        assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}]

    @each_case
    def test_it_runs_the_script_of_this_chart_once_where_the_operator_is(self, case: str) -> None:
        (pod,) = of_kind(case, "Pod")
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["restartPolicy"] == "Never"
        assert container["command"] == ["python3", "/check/check_install.py"]
        assert container["volumeMounts"] == [{"name": "check", "mountPath": "/check", "readOnly": True}]
        assert spec["volumes"] == [{"name": "check", "configMap": {"name": pod["metadata"]["name"]}}]
        env = {item["name"]: item["value"] for item in container["env"]}
        assert (env["API_URL"], env["NAMESPACE"]) == ("https://kubernetes.default.svc", NAMESPACE)
        asked = (CHART / "files" / "check_install.py").read_text()
        assert [name for name in env if f'os.environ["{name}"]' not in asked] == []
        assert container["image"] == operator(case)["template"]["spec"]["containers"][0]["image"]

    def test_its_account_and_rights_are_there_before_it_is(self) -> None:
        (pod,) = of_kind("default", "Pod")
        assert "helm.sh/hook-weight" not in pod["metadata"]["annotations"], "which is 0"
        for kind in ("ServiceAccount", "Role", "RoleBinding", "ConfigMap"):
            annotations = named("default", kind, pod["metadata"]["name"])["metadata"]["annotations"]
            assert int(annotations["helm.sh/hook-weight"]) < 0
