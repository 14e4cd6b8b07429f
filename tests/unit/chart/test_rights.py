"""What the chart lets the operator and people do. That the operator needs all of it is the API server's to prove."""

from __future__ import annotations

from typing import Any

import pytest

from chart_cases.rendering import CASES, NAMESPACE, named, objects, of_kind, rights
from operator_cases.objects import pdcluster
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.manifests.pool import pool_of
from pdcluster_operator.core.manifests.router import router_access
from pdcluster_operator.kinds import KINDS, LEADER_WORKER_SET, PDCLUSTER, POD, SECRET, WATCHED_CHILDREN

READERS_ONLY = {"why", "askedBy", "ofLease"}


def plain(part: str) -> list[dict[str, Any]]:
    """The rules of one part as they are to be rendered."""
    lease = {"resourceNames": ["pdcluster-operator"]}
    return [
        {key: value for key, value in rule.items() if key not in READERS_ONLY} | (lease if "ofLease" in rule else {})
        for rule in rights()[part]
    ]


def rules_of(case: str) -> list[dict[str, Any]]:
    """All rules of all roles of a case."""
    roles = of_kind(case, "ClusterRole") + of_kind(case, "Role")
    return [rule for role in roles for rule in role["rules"]]


@pytest.mark.parametrize("case", CASES)
def test_no_rule_has_a_wildcard_or_a_resource_that_gives_more_than_it_says(case: str) -> None:
    for rule in rules_of(case):
        words = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert "*" not in "".join(words)
        assert {"bind", "escalate", "impersonate"}.isdisjoint(rule["verbs"])
        assert "nonResourceURLs" not in rule


def test_every_right_has_its_reason_and_is_there_once() -> None:
    for rules in rights().values():
        found = [
            (g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
        ]
        assert len(found) == len(set(found))
        assert [rule for rule in rules if not rule["why"].endswith(".")] == []
        assert {key for rule in rules for key in rule} <= READERS_ONLY | {"apiGroups", "resources", "verbs"}
        assert {rule.get("askedBy", "server") for rule in rules} == {"server"}


def test_the_operator_lists_no_secrets_and_removes_no_pod() -> None:
    verbs = {r: set(rule["verbs"]) for rule in rights()["watched"] for r in rule["resources"]}
    assert verbs["secrets"] == {"get", "create"}
    assert verbs["pods"] == {"list", "watch"}
    assert {"configmaps", "pods/exec", "nodes", "namespaces", "clusterroles"}.isdisjoint(verbs)


def triples(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Group, resource and verb of each right."""
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def test_the_operator_holds_what_it_gives_to_routers() -> None:
    """The API server lets nobody give away a right that he lacks."""
    pool = pool_of(PDCluster.from_wire(pdcluster({})), "router:1")
    (role,) = [document for document in router_access(pool) if document["kind"] == "Role"]
    assert triples(role["rules"])
    assert triples(role["rules"]) <= triples(rights()["watched"])


def test_every_kind_that_the_operator_knows_has_its_rights_and_no_other_has_any() -> None:
    held = triples(rights()["watched"])
    for kind in (PDCLUSTER, POD, LEADER_WORKER_SET, *WATCHED_CHILDREN):
        assert {(kind.group, kind.plural, verb) for verb in ("list", "watch")} <= held, kind
    for kind in (LEADER_WORKER_SET, *WATCHED_CHILDREN, SECRET):
        assert {(kind.group, kind.plural, verb) for verb in ("get", "create")} <= held, kind
    known = {(kind.group, kind.plural) for kind in KINDS.values()} | {("discovery.k8s.io", "endpointslices")}
    assert {(group, resource.partition("/")[0]) for group, resource, _ in held | triples(rights()["own"])} == known


def test_cluster_wide_the_rights_are_those_of_the_file() -> None:
    assert named("default", "ClusterRole", "pdcluster-operator")["rules"] == plain("watched")
    assert named("default", "Role", "pdcluster-operator-lease")["rules"] == plain("own")
    (binding,) = of_kind("default", "ClusterRoleBinding")
    account = named("default", "ServiceAccount", "pdcluster-operator")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert binding["roleRef"]["name"] == "pdcluster-operator"


def test_in_namespaced_mode_the_rights_end_where_the_namespaces_do() -> None:
    roles = [role for role in of_kind("namespaced", "Role") if role["metadata"]["name"] == "pdcluster-operator"]
    assert {role["metadata"]["namespace"] for role in roles} == {"team-a", "team-b"}
    assert all(role["rules"] == plain("watched") for role in roles)
    bindings = [b for b in of_kind("namespaced", "RoleBinding") if b["metadata"]["name"] == "pdcluster-operator"]
    assert {binding["metadata"]["namespace"] for binding in bindings} == {"team-a", "team-b"}
    assert all(binding["subjects"][0]["namespace"] == NAMESPACE for binding in bindings)
    assert of_kind("namespaced", "ClusterRoleBinding") == []
    for role in of_kind("namespaced", "ClusterRole"):
        assert [key for key in role["metadata"]["labels"] if "aggregate-to" in key], "a role that people get"


def test_the_lease_is_the_one_that_the_operator_is_told() -> None:
    (deployment,) = of_kind("default", "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    rules = named("default", "Role", "pdcluster-operator-lease")["rules"]
    names = [rule["resourceNames"] for rule in rules if "resourceNames" in rule]
    assert names == [["pdcluster-operator"]]
    assert "--lease-name=pdcluster-operator" in args
    assert [rule["verbs"] for rule in rules if "resourceNames" not in rule] == [["create"]]


def test_a_release_that_gets_no_rights_makes_no_role_but_that_of_its_test() -> None:
    kinds = [o["kind"] for o in objects("a second release") if o["metadata"]["name"] != "pdcluster-second-check"]
    assert {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount"}.isdisjoint(kinds)


def test_people_get_these_rights_and_no_other() -> None:
    """Kubernetes adds them to the roles that everybody with ``view`` or ``edit`` has."""
    roles = {role: named("default", "ClusterRole", f"pdcluster-{role}") for role in ("view", "edit")}
    for role, found in roles.items():
        assert found["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
    view, edit = (triples(found["rules"]) for found in roles.values())
    group, pool, scaler = "pdcluster.dev", "pdclusters", "pdrolescalers"
    assert view == {
        *((group, kind, verb) for kind in (pool, scaler) for verb in ("get", "list", "watch")),
        *((group, part, "get") for part in (f"{pool}/status", f"{scaler}/status", f"{scaler}/scale")),
    }
    assert edit == {
        *((group, pool, verb) for verb in ("create", "update", "patch", "delete", "deletecollection")),
        *((group, part, verb) for part in (scaler, f"{scaler}/scale") for verb in ("update", "patch")),
    }
