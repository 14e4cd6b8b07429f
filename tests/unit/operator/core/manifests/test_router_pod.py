"""A router's pod: who it is, what it holds, what it may do and where it stands."""

from __future__ import annotations

from typing import Any

from fakes.operator_cluster import IMAGE, make_cluster
from pdcluster_operator.core.manifests.router import router_deployment
from pdcluster_operator.core.plan import pool_of

SECRET = {"spec.auth": {"secretRef": {"name": "mine", "key": "token"}}}


def deployment(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The Deployment's spec."""
    found: dict[str, Any] = router_deployment(pool_of(make_cluster(changes), IMAGE))["spec"]
    return found


def pod(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The pod's spec."""
    found: dict[str, Any] = deployment(changes)["template"]["spec"]
    return found


def container(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    (found,) = pod(changes)["containers"]
    assert isinstance(found, dict)
    return found


def test_there_are_as_many_as_the_user_wants() -> None:
    assert deployment({"spec.router.replicas": 5})["replicas"] == 5


def test_it_shows_the_api_server_who_it_is() -> None:
    assert (pod()["automountServiceAccountToken"], pod()["serviceAccountName"]) == (True, "pool-router")


def test_it_signs_with_the_pools_secret_and_is_called_back_at_its_own_address() -> None:
    env = {one["name"]: one["valueFrom"] for one in container()["env"]}
    assert env == {
        "POD_IP": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}},
        "PDCLUSTER_SECRET": {"secretKeyRef": {"name": "pool-secret", "key": "secret"}},
    }
    users = {one["name"]: one["valueFrom"] for one in container(SECRET)["env"]}
    assert users["PDCLUSTER_SECRET"] == {"secretKeyRef": {"name": "mine", "key": "token"}}


def test_it_can_only_compute() -> None:
    security = pod()["securityContext"]
    assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert security["runAsUser"] > 10000, "a number that is no user of any node"
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["volumes"] == [{"name": "tmp", "emptyDir": {}}]


def test_it_has_the_resources_that_the_user_gives_it() -> None:
    resources = {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}
    assert container({"spec.router.resources": resources})["resources"] == resources


def test_routers_are_spread_over_nodes_and_one_node_is_no_reason_to_wait() -> None:
    (term,) = pod()["topologySpreadConstraints"]
    assert (term["topologyKey"], term["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert term["labelSelector"] == deployment()["selector"]


def test_overrides_never_take_the_labels_by_which_it_is_found() -> None:
    overrides = {"metadata": {"labels": {"pdcluster.dev/cluster": "another", "team": "a"}}}
    labels = deployment({"spec.router.podOverrides": overrides})["template"]["metadata"]["labels"]
    assert labels["team"] == "a"
    assert deployment()["selector"]["matchLabels"].items() <= labels.items()
