"""Routers that gateways ask: their flags, their port, their Secret, and who may come in."""

from __future__ import annotations

from typing import Any, Final

import pytest

from fakes.operator_cluster import make_pool
from pdcluster_operator.core.manifests.network import role_policy, router_policy
from pdcluster_operator.core.manifests.router import internal_service, mounted_secrets, router_deployment
from pdcluster_operator.core.manifests.workloads import revision_for
from pdcluster_protocol.labels import Role
from pdcluster_router.__main__ import parse_settings
from pdcluster_router.settings.router_settings import Settings

FOLDER: Final = "/etc/pdcluster/picker-tls"
NAMESPACES: Final = ["gateways", "more-gateways"]


def picker(**tls: Any) -> dict[str, Any]:
    field = {"gatewayNamespaces": NAMESPACES, **({"tls": {"secretName": "shown", **tls}} if tls else {})}
    return {"spec.router.picker": field}


PLAIN: Final = picker()
TLS: Final = picker(clientCertificates=False)
MUTUAL: Final = picker(clientCertificates=True)
EACH: Final = pytest.mark.parametrize("changes", [PLAIN, TLS, MUTUAL], ids=["plain", "TLS", "mTLS"])


def pod(changes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = router_deployment(make_pool(changes))["spec"]["template"]["spec"]
    return found


def container(changes: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(changes)["containers"]
    assert isinstance(found, dict)
    return found


def settings_of(changes: dict[str, Any]) -> Settings:
    """As the router takes its command line."""
    words = [word.replace("$(POD_IP)", "10.0.0.7") for word in container(changes)["args"]]
    return parse_settings([*words, "--namespace=default", "--kube-api=https://10.0.0.1"])


def service_port(changes: dict[str, Any]) -> dict[str, Any]:
    _, found = internal_service(make_pool(changes))["spec"]["ports"]
    assert isinstance(found, dict)
    return found


@EACH
def test_the_router_listens_where_the_service_leads(changes: dict[str, Any]) -> None:
    port = service_port(changes)
    ports = {one["name"]: one["containerPort"] for one in container(changes)["ports"]}
    assert settings_of(changes).picker_port == ports[port["targetPort"]] == port["port"] == 9002


@EACH
def test_the_service_leads_to_no_router_that_speaks_otherwise(changes: dict[str, Any]) -> None:
    others = [one for one in (PLAIN, TLS) if is_over_tls(one) != is_over_tls(changes)]
    target = service_port(changes)["targetPort"]
    assert [target in names_of_ports(one) for one in (changes, *others)] == [True, False]
    assert service_port(changes)["name"] == "picker"


def is_over_tls(changes: dict[str, Any]) -> bool:
    return "tls" in changes["spec.router.picker"]


def names_of_ports(changes: dict[str, Any]) -> list[str]:
    return [one["name"] for one in container(changes)["ports"]]


@pytest.mark.parametrize(
    ("changes", "spoken"), [(PLAIN, "kubernetes.io/h2c"), (TLS, "http2"), (MUTUAL, "http2")], ids=str
)
def test_the_service_says_how_gateways_speak(changes: dict[str, Any], spoken: str) -> None:
    assert service_port(changes)["appProtocol"] == spoken


@pytest.mark.parametrize(
    ("changes", "files"),
    [(PLAIN, []), (TLS, ["tls.crt", "tls.key"]), (MUTUAL, ["tls.crt", "tls.key", "ca.crt"])],
    ids=["plain", "TLS", "mTLS"],
)
def test_each_file_that_a_router_is_told_of_is_mounted_from_the_secret(
    changes: dict[str, Any], files: list[str]
) -> None:
    told = settings_of(changes)
    paths = [told.picker_tls_cert, told.picker_tls_key, told.picker_client_ca]
    assert [str(path) for path in paths if path] == [f"{FOLDER}/{name}" for name in files]
    volumes = [one["secret"] for one in pod(changes)["volumes"] if one["name"] == "picker-tls"]
    items = [{"key": name, "path": name} for name in files]
    assert volumes == ([{"secretName": "shown", "items": items}] if files else [])
    mounts = [one for one in container(changes)["volumeMounts"] if one["name"] == "picker-tls"]
    assert mounts == ([{"name": "picker-tls", "mountPath": FOLDER, "readOnly": True}] if files else [])


def test_the_secret_must_have_the_keys_that_are_mounted() -> None:
    assert mounted_secrets(make_pool(PLAIN)) == []
    (pair,) = mounted_secrets(make_pool(TLS))
    assert (pair.name, pair.keys, pair.who) == ("shown", ("tls.crt", "tls.key"), "routers")
    assert pair.cure == "make it, or leave router.picker.tls out"
    same, authority = mounted_secrets(make_pool(MUTUAL))
    assert same == pair
    assert (authority.name, authority.keys) == ("shown", ("ca.crt",))
    assert authority.cure == "make it, or leave router.picker.tls.clientCertificates out"


@EACH
def test_gateways_of_these_namespaces_reach_the_port_and_nothing_else_of_routers_does(changes: dict[str, Any]) -> None:
    rules = router_policy(make_pool(changes))["spec"]["ingress"]
    assert rules[:2] == router_policy(make_pool())["spec"]["ingress"]
    assert rules[2:] == [from_gateways(9002)]
    assert [rule for rule in rules if {"protocol": "TCP", "port": 9002} in rule["ports"]] == rules[2:]


@EACH
def test_gateways_reach_decode_engines_and_no_prefill_engine(changes: dict[str, Any]) -> None:
    decode, prefill = (role_policy(make_pool(changes), role)["spec"] for role in (Role.DECODE, Role.PREFILL))
    assert decode["ingress"] == [*role_policy(make_pool(), Role.DECODE)["spec"]["ingress"], from_gateways(8000)]
    assert decode["egress"] == role_policy(make_pool(), Role.DECODE)["spec"]["egress"]
    assert prefill == role_policy(make_pool(), Role.PREFILL)["spec"]


def from_gateways(port: int) -> dict[str, Any]:
    named = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": NAMESPACES}
    peers = [{"namespaceSelector": {"matchExpressions": [named]}}]
    return {"from": peers, "ports": [{"protocol": "TCP", "port": port}]}


def test_a_pool_without_the_field_has_no_port_for_gateways() -> None:
    assert settings_of({}).picker_port == 0
    assert [one["name"] for one in internal_service(make_pool())["spec"]["ports"]] == ["internal"]
    assert [one["name"] for one in container({})["ports"]] == ["http", "internal"]


def test_no_engine_is_replaced_for_the_field() -> None:
    assert revision_for(make_pool(MUTUAL)) == revision_for(make_pool())
