"""A router's pod: who it is, what it holds, what it may do and where it stands."""

from __future__ import annotations

from typing import Any, Final

import pytest

from fakes.operator_cluster import make_pool
from operator_cases.objects import both
from pdcluster_operator.core.manifests.engine_pod import engine_template
from pdcluster_operator.core.manifests.network import router_policy
from pdcluster_operator.core.manifests.router import mounted_secrets, router_deployment
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role

SECRET = {"spec.auth": {"secretRef": {"name": "mine", "key": "token"}}}


def deployment(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The Deployment's spec."""
    found: dict[str, Any] = router_deployment(make_pool(changes))["spec"]
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


def test_the_last_lines_of_its_log_are_kept_when_it_dies() -> None:
    assert container()["terminationMessagePolicy"] == "FallbackToLogsOnError"


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


def test_a_request_has_a_limit_only_where_the_user_gives_one() -> None:
    assert not [word for word in container()["args"] if word.startswith("--request-timeout")]
    assert "--request-timeout=900" in container({"spec.router.requestTimeoutSeconds": 900})["args"]


def test_clients_keys_are_read_from_a_folder_that_follows_their_secret() -> None:
    assert not [word for word in container()["args"] if word.startswith("--api-key-file")]
    changes = {"spec.router.apiKeysSecretRef": {"name": "clients"}}
    assert "--api-key-file=/etc/pdcluster/api-keys/keys" in container(changes)["args"]
    assert pod(changes)["volumes"][1:] == [
        {"name": "api-keys", "secret": {"secretName": "clients", "items": [{"key": "keys", "path": "keys"}]}}
    ]
    mount = {"name": "api-keys", "mountPath": "/etc/pdcluster/api-keys", "readOnly": True}
    assert mount in container(changes)["volumeMounts"]


TOKENS = {"issuer": "https://login.example", "audience": "pool"}


def test_the_keys_of_tokens_are_read_from_a_folder_that_follows_their_secret() -> None:
    assert not [word for word in container()["args"] if word.startswith("--jwt")]
    changes = {"spec.router.tokens": {**TOKENS, "keySetSecretRef": {"name": "provider"}}}
    assert [word for word in container(changes)["args"] if word.startswith("--jwt")] == [
        "--jwt-key-set=/etc/pdcluster/jwt/jwks.json",
        "--jwt-issuer=https://login.example",
        "--jwt-audience=pool",
        "--jwt-client-claim=sub",
    ]
    items = [{"key": "jwks.json", "path": "jwks.json"}]
    assert pod(changes)["volumes"][1:] == [{"name": "jwt", "secret": {"secretName": "provider", "items": items}}]
    mount = {"name": "jwt", "mountPath": "/etc/pdcluster/jwt", "readOnly": True}
    assert mount in container(changes)["volumeMounts"]
    (wanted,) = mounted_secrets(make_pool(changes))
    assert (wanted.name, wanted.keys) == ("provider", ("jwks.json",))


@pytest.mark.parametrize(("host", "port"), [("login.example", 443), ("login.example:8443", 8443)])
def test_the_keys_of_tokens_are_asked_for_at_a_url_whose_port_routers_may_reach(host: str, port: int) -> None:
    url = f"https://{host}/jwks"
    changes = {"spec.router.tokens": {**TOKENS, "clientClaim": "client_id", "keySetUrl": url}}
    assert f"--jwt-key-set={url}" in container(changes)["args"]
    assert "--jwt-client-claim=client_id" in container(changes)["args"]
    assert pod(changes)["volumes"] == pod()["volumes"]
    before, after = (router_policy(make_pool(each))["spec"]["egress"] for each in ({}, changes))
    assert after == [*before[:-1], {"ports": [{"protocol": "TCP", "port": port}]}, before[-1]]


TLS = {"spec.router.tls": {"secretName": "certificate"}}


def test_a_certificate_is_read_from_a_folder_that_follows_its_secret() -> None:
    assert not [word for word in container()["args"] if word.startswith("--tls")]
    args = container(TLS)["args"]
    assert "--tls-cert=/etc/pdcluster/tls/tls.crt" in args
    assert "--tls-key=/etc/pdcluster/tls/tls.key" in args
    items = [{"key": "tls.crt", "path": "tls.crt"}, {"key": "tls.key", "path": "tls.key"}]
    assert pod(TLS)["volumes"][1:] == [{"name": "tls", "secret": {"secretName": "certificate", "items": items}}]
    mount = {"name": "tls", "mountPath": "/etc/pdcluster/tls", "readOnly": True}
    assert mount in container(TLS)["volumeMounts"]


def test_a_router_with_a_certificate_is_probed_over_tls_and_still_plain_on_its_internal_port() -> None:
    plain, tls = container()["readinessProbe"], container(TLS)["readinessProbe"]
    assert "scheme" not in plain["httpGet"]
    assert tls["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}
    assert container(TLS)["livenessProbe"] == container()["livenessProbe"]
    assert container(TLS)["startupProbe"] == container()["startupProbe"]


PROXIES = {"spec.router.proxies": {"trusted": ["10.0.0.0/8", "2001:db8::1"]}}
PREFACED: dict[str, Any] = {"spec.router.proxies": {"trusted": ["10.0.0.0/8"], "proxyProtocol": "required"}, **TLS}


def test_it_is_told_which_proxies_to_believe() -> None:
    named = ("--trusted", "--forwarded", "--proxy")
    assert not [word for word in container()["args"] if word.startswith(named)]
    assert [word for word in container(PROXIES)["args"] if word.startswith(named)] == [
        "--trusted-proxies=10.0.0.0/8,2001:db8::1",
        "--forwarded-header=x-forwarded-for",
        "--proxy-protocol=none",
    ]
    assert container(PROXIES)["readinessProbe"] == container()["readinessProbe"]


def test_where_clients_come_with_a_proxy_header_a_kubelet_asks_the_internal_port() -> None:
    assert "--proxy-protocol=required" in container(PREFACED)["args"]
    assert container(PREFACED)["readinessProbe"]["httpGet"] == {"path": "/health", "port": "internal"}


FROM_A: dict[str, Any] = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "k"}}}


def test_it_has_the_key_that_engines_ask_for() -> None:
    assert FROM_A in container(both("env", [FROM_A]))["env"]
    value = {"name": "VLLM_API_KEY", "value": "hidden"}
    assert value in container(both("env", [value]))["env"]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("given", [[], [FROM_A]], ids=["alone", "beside the one in env"])
def test_a_key_in_the_overrides_of_engines_is_refused_with_the_place_where_routers_read_it_too(
    role: Role, given: list[Any]
) -> None:
    """Engines would ask for a key that routers do not show: every request is answered with 401."""
    value = {"name": "VLLM_API_KEY", "value": "hidden"}
    overrides = {"spec": {"containers": [{"name": "engine", "env": [value]}]}}
    changes = {**both("env", given), f"spec.roles.{role.value}.podOverrides": overrides}
    with pytest.raises(ConfigError) as error:
        engine_template(make_pool(changes), role, "0a1b2c3d")
    assert str(error.value) == (
        f"roles.{role.value}.podOverrides changes env VLLM_API_KEY of the engine, which routers do not see: put it in "
        "roles.prefill.env and roles.decode.env, which routers read too"
    )


REPLACED: Final[dict[str, Any]] = {
    "no containers": {"spec": {"$patch": "replace", "nodeName": "x"}},
    "no spec": {"spec": None},
    "no list": {"spec": {"containers": None}},
    "nothing of ours": {"$patch": "replace"},
    "a text": {"$patch": "replace", "spec": "x"},
    "a map of variables": {"spec": {"containers": [{"$patch": "replace", "name": "engine", "env": {"a": 1}}]}},
}


@pytest.mark.parametrize("how", REPLACED)
def test_overrides_that_leave_no_engine_are_the_api_servers_to_refuse(how: str) -> None:
    pool = make_pool(both("podOverrides", REPLACED[how]))
    assert engine_template(pool, Role.DECODE, "0a1b2c3d")["metadata"]["labels"]


def test_a_key_of_a_container_beside_the_engine_is_its_own() -> None:
    beside = {"name": "beside", "image": "i", "env": [{"name": "VLLM_API_KEY", "value": "of another"}]}
    changes = both("podOverrides", {"spec": {"containers": [beside]}})
    engine, other = engine_template(make_pool(changes), Role.DECODE, "0a1b2c3d")["spec"]["containers"]
    assert (engine["name"], other["name"]) == ("engine", "beside")


@pytest.mark.parametrize(
    ("prefill", "decode", "told"),
    [
        ([FROM_A], [], 'is {"secretKeyRef": {"key": "k", "name": "a"}} in roles.prefill and not set in roles.decode'),
        (
            [{"name": "VLLM_API_KEY", "value": "hidden"}],
            [{"name": "VLLM_API_KEY", "value": "other"}],
            "is a value in roles.prefill and another value in roles.decode",
        ),
    ],
)
def test_roles_that_ask_for_different_keys_are_refused_and_no_key_is_told(
    prefill: list[Any], decode: list[Any], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        container({"spec.roles.prefill.env": prefill, "spec.roles.decode.env": decode})
    assert told in str(error.value)
    assert "hidden" not in str(error.value)
