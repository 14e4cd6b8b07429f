"""Children beside the workloads: who finds whom, who may speak to whom, and who may do what."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from chart_cases.rendering import of_kind
from fakes.operator_cluster import IMAGE, make_cluster, make_pool
from operator_cases.objects import both
from pdcluster_operator.core.manifests.network import role_policy, router_policy
from pdcluster_operator.core.manifests.pool import pool_of
from pdcluster_operator.core.manifests.router import (
    internal_service,
    internal_url,
    router_access,
    router_deployment,
    router_service,
    router_url,
)
from pdcluster_operator.core.manifests.standing import (
    discovery_service,
    engine_account,
    pool_secret,
    role_budget,
    role_scaler,
    router_budget,
    scaler_selector,
)
from pdcluster_operator.core.manifests.workloads import design_workload, render_workload
from pdcluster_protocol.labels import Role
from pdcluster_router.__main__ import parse_settings
from pdcluster_router.settings.forms import Discovery

REVISION = "0a1b2c3d"
CLUSTER = "pdcluster.dev/cluster"
DNS = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
GROUPS = {**both("device", {"kind": "cuda"}), **both("parallelism.tensor", 4), **both("nodesPerInstance", 2)}


def engine_labels(role: Role, changes: dict[str, Any] | None = None, part: str = "template") -> dict[str, str]:
    ours = make_pool(changes)
    spec = render_workload(ours, design_workload(ours, role, REVISION), 1)["spec"]
    found: dict[str, str] = spec.get("leaderWorkerTemplate", spec)[part]["metadata"]["labels"]
    return found


def router_labels(changes: dict[str, Any] | None = None) -> dict[str, str]:
    found: dict[str, str] = router_deployment(make_pool(changes))["spec"]["template"]["metadata"]["labels"]
    return found


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """As Kubernetes' label selector with matchLabels, and matchExpressions of In."""
    terms = selector.get("matchExpressions", [])
    assert all(term["operator"] == "In" for term in terms)
    is_listed = all(labels.get(term["key"]) in term["values"] for term in terms)
    return is_listed and selector.get("matchLabels", {}).items() <= labels.items()


OURS: dict[str, dict[str, str]] = {
    "prefill": engine_labels(Role.PREFILL),
    "decode": engine_labels(Role.DECODE),
    "router": router_labels(),
}
ANOTHER = {"metadata.name": "another"}
STRANGE: dict[str, dict[str, str]] = {
    "another pool's prefill engine": engine_labels(Role.PREFILL, ANOTHER),
    "another pool's decode engine": engine_labels(Role.DECODE, ANOTHER),
    "another pool's router": router_labels(ANOTHER),
    "a pod of nobody's": {"app": "theirs"},
    "a pod that only says whose it is": {CLUSTER: "pool"},
}
"""Labels of pods that have no business with the pool's engines and routers."""


Ports = list[list[int] | None]
"""Of each rule one list; None: all ports."""


def policies() -> dict[str, dict[str, Any]]:
    """The spec of each policy, by whom it is for."""
    found = {role.value: role_policy(make_pool(), role) for role in Role} | {"router": router_policy(make_pool())}
    return {name: policy["spec"] for name, policy in found.items()}


def ports_for(rules: list[dict[str, Any]], side: str, labels: dict[str, str] | None) -> Ports:
    """Of each rule that names the pod; of those that name nobody, and so mean anybody, for None.

    ``side``: from or to. Where no namespace is named a pod is one of our own namespace; only operators are of others.
    """
    found: Ports = []
    for rule in rules:
        peers = rule.get(side, [])
        assert all("podSelector" in peer for peer in peers)
        if any(labels is not None and selects(peer["podSelector"], labels) for peer in peers) or (
            labels is None and not peers
        ):
            found.append([port["port"] for port in rule["ports"]] if "ports" in rule else None)
    return found


class TestDiscovery:
    @pytest.mark.parametrize("role", Role)
    def test_it_finds_the_engines_of_its_role_and_revision_whatever_their_template(self, role: Role) -> None:
        found = discovery_service(make_pool(), role, REVISION)["spec"]["selector"]
        assert found.items() <= engine_labels(role).items()
        assert not found.items() <= engine_labels(role.other).items()
        assert not found.items() <= router_labels().items()
        assert found["pdcluster.dev/revision"] == REVISION, "else slices of one revision list engines of another"
        assert "pdcluster.dev/template" not in found

    def test_of_a_group_it_finds_the_leader_only(self) -> None:
        found = discovery_service(make_pool(), Role.DECODE, REVISION)["spec"]["selector"]
        assert found.items() <= engine_labels(Role.DECODE, GROUPS, "leaderTemplate").items()
        assert not found.items() <= engine_labels(Role.DECODE, GROUPS, "workerTemplate").items()

    def test_its_slices_say_what_the_router_asks_for(self) -> None:
        found = discovery_service(make_pool(), Role.DECODE, REVISION)
        asked = {"cluster": "pool", "role": "decode", "revision": REVISION}
        assert found["metadata"]["labels"].items() >= {f"pdcluster.dev/{key}": asked[key] for key in asked}.items()
        assert found["spec"]["clusterIP"] == "None"
        assert found["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http", "protocol": "TCP"}]

    def test_an_engine_that_is_not_ready_is_not_marked_ready(self) -> None:
        assert discovery_service(make_pool(), Role.PREFILL, REVISION)["spec"]["publishNotReadyAddresses"] is False


class TestRouter:
    def test_aliases_are_those_of_the_spec(self) -> None:
        aliases = {"gpt-4": "llama", "fast": "org/sql:v1=2"}
        listed = [{"name": name, "model": model} for name, model in aliases.items()]
        pod = router_deployment(make_pool({"spec.router.modelAliases": listed}))["spec"]["template"]["spec"]
        words = [word.replace("$(POD_IP)", "10.0.0.7") for word in pod["containers"][0]["args"]]
        settings = parse_settings([*words, "--namespace=default", "--kube-api=https://10.0.0.1"])
        assert settings.models_by_alias == aliases

    def test_its_command_line_is_one_that_the_router_takes(self) -> None:
        changes = {
            "spec.transfer": {"deadlineSeconds": 120, "onFailure": "fail"},
            "spec.drain.timeoutSeconds": 90,
            "spec.router": {
                "requestTimeoutSeconds": 900,
                "apiKeysSecretRef": {"name": "clients"},
                "policy": "affinity",
                "accessLog": True,
                "tls": {"secretName": "certificate"},
                "tokens": {"issuer": "https://login", "audience": "pool", "keySetUrl": "https://login/jwks"},
            },
        }
        container = router_deployment(make_pool(changes))["spec"]["template"]["spec"]["containers"][0]
        words = [word.replace("$(POD_IP)", "10.0.0.7") for word in container["args"]]
        # A pod finds its namespace and the API server by itself.
        settings = parse_settings([*words, "--namespace=default", "--kube-api=https://10.0.0.1"])
        assert (settings.discovery, settings.cluster) == (Discovery.KUBERNETES, "pool")
        assert settings.metaserver_url == "http://10.0.0.7:8001/v1/metaserver"
        assert (settings.host, settings.port, settings.wanted_internal_port) == ("0.0.0.0", 8000, 8001)
        assert (settings.request_timeout_s, str(settings.api_key_file)) == (900, "/etc/pdcluster/api-keys/keys")
        assert (settings.prefill_timeout_s, settings.on_prefill_failure.value) == (120, "fail")
        assert (settings.drain_timeout_s, settings.policy.value) == (90, "affinity")
        assert str(settings.access_log) == "-"
        assert (str(settings.tls_cert), str(settings.tls_key)) == (
            "/etc/pdcluster/tls/tls.crt",
            "/etc/pdcluster/tls/tls.key",
        )
        assert (settings.jwt_key_set, settings.jwt_issuer) == ("https://login/jwks", "https://login")
        assert container["command"] == ["pdcluster", "router"]
        assert container["image"] == IMAGE

    def test_a_router_has_no_access_log_unless_it_is_asked_for(self) -> None:
        args = router_deployment(make_pool())["spec"]["template"]["spec"]["containers"][0]["args"]
        assert not [word for word in args if word.startswith("--access-log")]

    def test_a_drain_longer_than_the_router_allows_is_cut_to_what_it_does(self) -> None:
        template = router_deployment(make_pool({"spec.drain.timeoutSeconds": 7200}))["spec"]["template"]["spec"]
        assert "--drain-timeout=3600" in template["containers"][0]["args"]
        assert template["terminationGracePeriodSeconds"] > 3600

    def test_a_new_one_is_ready_before_an_old_one_goes(self) -> None:
        assert router_deployment(make_pool())["spec"]["strategy"]["rollingUpdate"] == {
            "maxSurge": 1,
            "maxUnavailable": 0,
        }

    def test_one_that_goes_takes_requests_until_nobody_sends_any_and_has_time_for_those_that_it_has(self) -> None:
        template = router_deployment(make_pool({"spec.drain.timeoutSeconds": 90}))["spec"]["template"]["spec"]
        word, seconds = template["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert (word, int(seconds) >= 5) == ("sleep", True)
        assert template["terminationGracePeriodSeconds"] > int(seconds) + 90

    def test_ready_means_that_it_can_answer_and_alive_only_that_it_runs(self) -> None:
        container = router_deployment(make_pool())["spec"]["template"]["spec"]["containers"][0]
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        assert container["readinessProbe"]["httpGet"]["port"] == "http"
        assert container["livenessProbe"]["httpGet"] == {"path": "/", "port": "internal"}
        assert container["startupProbe"]["httpGet"] == {"path": "/", "port": "internal"}

    def test_clients_have_no_way_to_the_internal_port_whatever_type_their_service_is_of(self) -> None:
        changes = {"spec.router.service": {"type": "LoadBalancer"}}
        clients, internal = router_service(make_pool(changes)), internal_service(make_pool(changes))
        assert [port["targetPort"] for port in clients["spec"]["ports"]] == ["http"]
        assert internal["spec"]["type"] == "ClusterIP"
        assert internal["spec"]["ports"] == [
            {"name": "internal", "port": 8001, "targetPort": "internal", "protocol": "TCP"}
        ]
        assert internal["spec"]["selector"].items() <= router_labels().items()
        assert internal["metadata"]["name"] == "pool-router-internal"
        assert internal_url(make_pool()) == "http://pool-router-internal.default.svc:8001"
        container = router_deployment(make_pool())["spec"]["template"]["spec"]["containers"][0]
        assert {one["name"]: one["containerPort"] for one in container["ports"]} == {"http": 8000, "internal": 8001}

    def test_its_service_is_what_the_user_asks_for_and_leads_to_routers_only(self) -> None:
        service = {"type": "LoadBalancer", "port": 443, "annotations": {"lb": "internal"}}
        found = router_service(make_pool({"spec.router.service": service}))
        selector = found["spec"]["selector"]
        assert (found["spec"]["type"], found["spec"]["ports"][0]["port"]) == ("LoadBalancer", 443)
        assert found["metadata"]["annotations"] == {"lb": "internal"}
        assert selector.items() <= router_labels().items()
        assert not any(selector.items() <= engine_labels(role).items() for role in Role)

    def test_its_url_has_a_port_only_where_it_needs_one(self) -> None:
        assert router_url(make_pool()) == "http://pool-router.default.svc"
        assert router_url(make_pool({"spec.router.service.port": 8080})) == "http://pool-router.default.svc:8080"

    @pytest.mark.parametrize(("port", "shown"), [(443, ""), (80, ":80"), (8443, ":8443")])
    def test_with_a_certificate_its_url_and_its_service_say_so(self, port: int, shown: str) -> None:
        pool = make_pool({"spec.router.service.port": port, "spec.router.tls": {"secretName": "certificate"}})
        assert router_url(pool) == f"https://pool-router.default.svc{shown}"
        assert router_service(pool)["spec"]["ports"][0]["appProtocol"] == "https"
        assert "appProtocol" not in router_service(make_pool())["spec"]["ports"][0]

    def test_it_may_list_and_watch_endpointslices_and_no_more(self) -> None:
        _, role, binding = router_access(make_pool())
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        ]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        account = router_deployment(make_pool())["spec"]["template"]["spec"]["serviceAccountName"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "default"}]

    def test_overrides_lie_over_its_pod(self) -> None:
        overrides = {"spec": {"containers": [{"name": "router", "args": ["--help"]}]}}
        spec = router_deployment(make_pool({"spec.router.podOverrides": overrides}))["spec"]["template"]["spec"]
        assert spec["containers"][0]["args"] == ["--help"]


class TestNetwork:
    def test_a_policy_is_of_both_directions_and_lets_names_be_asked_for(self) -> None:
        for spec in policies().values():
            assert spec["policyTypes"] == ["Ingress", "Egress"]
            assert DNS in spec["egress"]

    @pytest.mark.parametrize("labels", STRANGE.values(), ids=list(STRANGE))
    def test_a_strange_pod_is_governed_by_none_of_the_policies_and_named_in_none(self, labels: dict[str, str]) -> None:
        for spec in policies().values():
            assert not selects(spec["podSelector"], labels)
            assert ports_for(spec["ingress"], "from", labels) == []
            assert ports_for(spec["egress"], "to", labels) == []

    def test_each_pod_of_ours_is_governed_by_its_own_policy_alone(self) -> None:
        for (name, spec), pod in product(policies().items(), OURS):
            assert selects(spec["podSelector"], OURS[pod]) is (name == pod)

    @pytest.mark.parametrize(
        ("policy", "side", "expected"),
        [
            ("prefill", "from", ([None], [None], [[8000]], [])),
            ("prefill", "to", ([None], [None], [], [[53, 53], [443]])),
            ("decode", "from", ([None], [None], [[8000]], [])),
            ("decode", "to", ([None], [None], [[8001, 8000]], [[53, 53], [443]])),
            ("router", "from", ([[8001]], [[8001]], [], [[8000]])),
            ("router", "to", ([[8000]], [[8000]], [], [[53, 53], [443, 6443]])),
        ],
    )
    def test_who_reaches_whom_on_which_ports(self, policy: str, side: str, expected: tuple[Ports, ...]) -> None:
        """Of the pool: prefill, decode, the router; and anybody.

        Decode calls routers on 8000 too: at an upgrade the policy changes at once, and routers of the template before
        the internal port drain for hours. The API server is no pod: no selector finds it.
        """
        rules = policies()[policy]["ingress" if side == "from" else "egress"]
        pods = (*OURS.values(), None)
        assert tuple(ports_for(rules, side, labels) for labels in pods) == expected

    @pytest.mark.parametrize(
        ("model", "may_fetch"), [({"name": "org/m"}, True), ({"path": "/m", "servedName": "m"}, False)]
    )
    def test_only_a_model_of_the_hub_is_fetched(self, model: dict[str, Any], may_fetch: bool) -> None:
        rules = role_policy(make_pool({"spec.model": model}), Role.PREFILL)["spec"]["egress"]
        assert ({"ports": [{"protocol": "TCP", "port": 443}]} in rules) is may_fetch

    @pytest.mark.parametrize(
        ("namespace", "selector"), [("", {}), ("ops", {"matchLabels": {"kubernetes.io/metadata.name": "ops"}})]
    )
    def test_the_internal_port_is_for_the_pools_engines_and_the_operator(
        self, namespace: str, selector: dict[str, Any]
    ) -> None:
        ours = replace(make_pool(), operator_namespace=namespace)
        _, internal = router_policy(ours)["spec"]["ingress"]
        engines, operator = internal["from"]
        assert internal["ports"] == [{"protocol": "TCP", "port": 8001}]
        assert all(selects(engines["podSelector"], engine_labels(role)) for role in Role)
        assert operator["namespaceSelector"] == selector
        (deployment,) = of_kind("default", "Deployment")
        assert selects(operator["podSelector"], deployment["spec"]["template"]["metadata"]["labels"])

    def test_routers_reach_the_api_server_where_the_operator_was_told_that_it_is(self) -> None:
        *_, api = router_policy(pool_of(make_cluster(), IMAGE, (8443,)))["spec"]["egress"]
        assert api == {"ports": [{"protocol": "TCP", "port": 8443}]}


class TestBudgets:
    @pytest.mark.parametrize(("unavailable", "budget"), [(0, 1), (1, 1), (3, 3)])
    def test_a_drain_may_take_what_a_rollout_may_but_at_least_one(self, unavailable: int, budget: int) -> None:
        spec = role_budget(make_pool(), Role.DECODE, unavailable)["spec"]
        assert spec["maxUnavailable"] == budget
        assert selects(spec["selector"], engine_labels(Role.DECODE))
        assert not selects(spec["selector"], engine_labels(Role.PREFILL))

    def test_one_that_serves_nobody_never_keeps_a_node(self) -> None:
        assert router_budget(make_pool())["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert selects(router_budget(make_pool())["spec"]["selector"], router_labels())


class TestAccess:
    def test_the_secret_holds_the_given_text_under_the_key_that_engines_read(self) -> None:
        found = pool_secret(make_pool(), "x" * 40)
        assert found["metadata"]["name"] == "pool-secret"
        assert b64decode(found["data"]["secret"]).decode() == "x" * 40
        assert found["immutable"] is True

    def test_engines_get_no_token(self) -> None:
        assert engine_account(make_pool())["automountServiceAccountToken"] is False

    def test_a_scaler_starts_with_the_roles_replicas(self) -> None:
        found = role_scaler(make_pool({"spec.roles.decode.replicas": 4}), Role.DECODE)
        assert found["spec"] == {"clusterRef": {"name": "pool"}, "role": "decode", "replicas": 4}

    def test_a_scalers_selector_counts_an_instance_once(self) -> None:
        terms = dict(term.split("=") for term in scaler_selector(make_pool(), Role.DECODE).split(","))
        assert terms.items() <= engine_labels(Role.DECODE, GROUPS, "leaderTemplate").items()
        assert not terms.items() <= engine_labels(Role.DECODE, GROUPS, "workerTemplate").items()
