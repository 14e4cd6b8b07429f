"""TLS inside a pool: each part is told the same files and the same name, and a pool without it is as it was."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest

from fakes.operator_cluster import make_pool
from operator_cases.objects import both
from pdcluster_cli.pod import drain, mirror, ready
from pdcluster_cli.tls_flags import TlsFlags, tls_flags_of
from pdcluster_connector.settings import parse_settings as parse_connector_settings
from pdcluster_operator.core.manifests.command import PodPlace
from pdcluster_operator.core.manifests.engine_pod import engine_template
from pdcluster_operator.core.manifests.pool_tls import server_name
from pdcluster_operator.core.manifests.router import internal_service, internal_url, mounted_secrets, router_deployment
from pdcluster_operator.core.manifests.standing import discovery_service
from pdcluster_operator.core.manifests.workloads import design_workload, revision_for
from pdcluster_protocol.labels import Role
from pdcluster_router.__main__ import parse_settings

TLS: Final[dict[str, Any]] = {"spec.tls": {"secretName": "inside"}}
NAMED: Final[dict[str, Any]] = {"spec.tls": {"secretName": "inside", "serverName": "pool.example"}}
GROUP: Final = {
    **TLS,
    **both("device", {"kind": "cuda"}),
    **both("parallelism.tensor", 16),
    **both("nodesPerInstance", 2),
}
NAME: Final = "pool-router-internal.default.svc"
SECRET: Final = "/etc/pdcluster/pool-tls"
COPY: Final = "/run/pdcluster/pool-tls"
FLAGS: Final = TlsFlags(f"{SECRET}/ca.crt", f"{SECRET}/tls.crt", f"{SECRET}/tls.key", NAME)
OF_COPY: Final = TlsFlags(f"{COPY}/ca.crt", f"{COPY}/tls.crt", f"{COPY}/tls.key", NAME)


def engine_pod(changes: dict[str, Any], role: Role = Role.DECODE, place: PodPlace = PodPlace.ALONE) -> dict[str, Any]:
    found: dict[str, Any] = engine_template(make_pool(changes), role, "0a1b2c3d", place)["spec"]
    return found


def router_pod(changes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = router_deployment(make_pool(changes))["spec"]["template"]["spec"]
    return found


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    assert isinstance(found, dict)
    return found


def value_of(name: str, words: list[str]) -> str:
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found


PODS: Final = [
    pytest.param(router_pod(TLS), id="router"),
    *(pytest.param(engine_pod(TLS, role), id=role.value) for role in Role),
    *(
        pytest.param(engine_pod(GROUP, Role.DECODE, place), id=place.name)
        for place in (PodPlace.LEADER, PodPlace.WORKER)
    ),
]


@pytest.mark.parametrize("pod", PODS)
def test_each_file_that_a_pod_names_is_one_that_it_mounts(pod: dict[str, Any]) -> None:
    named = set(re.findall(rf"(?:{SECRET}|{COPY})(?=/)/[\w.]+", json.dumps(container(pod))))
    used = COPY if "mirror" in container(pod)["command"] else SECRET
    assert {f"{used}/ca.crt", f"{used}/tls.crt", f"{used}/tls.key"} <= named
    mounts = {one["mountPath"]: one["name"] for one in container(pod)["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    keys = {one["key"]: one["path"] for one in volumes[mounts[SECRET]]["secret"]["items"]}
    assert keys == {name: name for name in ("tls.crt", "tls.key", "ca.crt")}
    assert volumes[mounts[SECRET]]["secret"]["secretName"] == "inside"
    for path in named:
        folder, _, name = path.rpartition("/")
        assert folder in mounts
        assert name in keys
    if COPY in mounts:
        assert volumes[mounts[COPY]]["emptyDir"] == {"medium": "Memory"}


def test_the_router_asks_engines_by_tls_and_its_internal_port_has_it() -> None:
    words = [word.replace("$(POD_IP)", "10.0.0.7") for word in container(router_pod(TLS))["args"]]
    settings = parse_settings([*words, "--namespace=default", "--kube-api=https://10.0.0.1"])
    assert settings.metaserver_url == "https://10.0.0.7:8001/v1/metaserver"
    files = (settings.engine_ca, settings.engine_cert, settings.engine_key)
    assert list(map(str, files)) == [FLAGS.ca, FLAGS.cert, FLAGS.key]
    assert (str(settings.internal_tls_cert), str(settings.internal_tls_key)) == (FLAGS.cert, FLAGS.key)
    assert settings.engine_tls_name == NAME
    assert settings.internal_client_ca is None, "kubelets and the API server's proxy have no certificate"


def test_a_kubelet_asks_the_routers_internal_port_over_tls() -> None:
    prefaced = {"spec.router.proxies": {"trusted": ["10.0.0.0/8"], "proxyProtocol": "required"}}
    over_tls = {"path": "/", "port": "internal", "scheme": "HTTPS"}
    assert container(router_pod(TLS))["livenessProbe"]["httpGet"] == over_tls
    assert container(router_pod(TLS))["startupProbe"]["httpGet"] == over_tls
    assert container(router_pod(TLS))["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    found = container(router_pod({**TLS, **prefaced}))["readinessProbe"]["httpGet"]
    assert found == {**over_tls, "path": "/health"}


@pytest.mark.parametrize("role", Role)
def test_an_engine_asks_for_certificates_and_takes_renewed_ones(role: Role) -> None:
    words = container(engine_pod(TLS, role))["args"]
    assert [word for word in words if "ssl" in word] == [
        f"--ssl-certfile={COPY}/tls.crt",
        f"--ssl-keyfile={COPY}/tls.key",
        f"--ssl-ca-certs={COPY}/ca.crt",
        "--ssl-cert-reqs=2",
        "--enable-ssl-refresh",
    ]


@pytest.mark.parametrize("role", Role)
def test_an_engine_is_started_beside_a_copy_that_follows_the_secret(role: Role) -> None:
    found = container(engine_pod(TLS, role))
    given = mirror.make_parser().parse_args([*found["command"][2:], *found["args"]])
    assert found["command"][:2] == ["pdcluster", "mirror"]
    assert (str(given.source), str(given.target)) == (SECRET, COPY)
    assert given.command == [*container(engine_pod({}, role))["command"], *found["args"]]


def test_a_worker_without_a_server_has_no_copy_and_asks_its_leader_by_tls() -> None:
    pod = engine_pod(GROUP, Role.DECODE, PodPlace.WORKER)
    worker = container(pod)
    assert "pool-tls-copy" not in json.dumps(pod)
    assert worker["command"] == ["python3", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert not [word for word in worker["args"] if "ssl" in word]
    (script,) = worker["lifecycle"]["preStop"]["exec"]["command"][2:]
    assert f"--tls-ca {FLAGS.ca} " in script
    assert script.endswith(f'--tls-name {NAME} --host "$LWS_LEADER_ADDRESS"')


@pytest.mark.parametrize("role", Role)
def test_probes_and_drain_of_an_engine_are_commands_with_its_copy_of_the_certificate(role: Role) -> None:
    found = container(engine_pod(TLS, role))
    startup, alive, readiness = (found[f"{name}Probe"] for name in ("startup", "liveness", "readiness"))
    assert not [probe for probe in (startup, alive, readiness) if "httpGet" in probe]
    for probe, is_alive in ((startup, True), (alive, True), (readiness, False)):
        given = ready.make_parser().parse_args(probe["exec"]["command"][2:])
        assert (given.role, given.port, given.alive, tls_flags_of(given)) == (role.value, 8000, is_alive, OF_COPY)
        assert probe["timeoutSeconds"] > given.timeout_s
    assert startup["periodSeconds"] * startup["failureThreshold"] == 7200
    hook = drain.make_parser().parse_args(found["lifecycle"]["preStop"]["exec"]["command"][2:])
    assert tls_flags_of(hook) == OF_COPY


def test_decode_calls_routers_by_tls_only() -> None:
    config = {
        role: json.loads(value_of("kv-transfer-config", container(engine_pod(TLS, role))["args"])) for role in Role
    }
    settings = parse_connector_settings(config[Role.DECODE]["kv_connector_extra_config"])
    assert (settings.metaserver_ca, settings.metaserver_tls_name) == (FLAGS.ca, NAME)
    assert "metaserver" not in json.dumps(config[Role.PREFILL]), "prefill calls no router"


def test_services_say_that_their_ports_have_tls() -> None:
    found = [internal_service(make_pool(TLS)), *(discovery_service(make_pool(TLS), role, "r") for role in Role)]
    assert [port["appProtocol"] for one in found for port in one["spec"]["ports"]] == ["https"] * 3
    assert [one["metadata"]["labels"]["pdcluster.dev/scheme"] for one in found] == ["https"] * 3
    assert internal_url(make_pool(TLS)) == f"https://{NAME}:8001"


def test_the_name_is_that_of_the_internal_service_unless_the_user_gives_one() -> None:
    assert server_name(make_pool(TLS)) == NAME
    assert server_name(make_pool(NAMED)) == "pool.example"
    assert "--engine-tls-name=pool.example" in container(router_pod(NAMED))["args"]


def test_a_secret_that_is_not_there_is_told_of_engines_and_routers() -> None:
    (secret,) = mounted_secrets(make_pool(TLS))
    assert (secret.name, secret.keys) == ("inside", ("tls.crt", "tls.key", "ca.crt"))
    assert secret.who == "engines and routers"


def test_a_pool_with_tls_is_another_revision_and_both_roles_are_replaced() -> None:
    revisions = {revision_for(make_pool(changes)) for changes in ({}, TLS, NAMED, {"spec.tls": {"secretName": "b"}})}
    assert len(revisions) == 4
    for role in Role:
        assert len({design_workload(make_pool(changes), role, "r").template for changes in ({}, TLS, NAMED)}) == 3


@pytest.mark.parametrize("role", Role)
def test_a_pool_without_it_has_nothing_of_it(role: Role) -> None:
    pool = make_pool()
    rendered = [
        router_deployment(pool),
        engine_pod({}, role),
        internal_service(pool),
        discovery_service(pool, role, "r"),
    ]
    for word in ("tls", "ssl", "https", "mirror", "scheme"):
        assert word not in json.dumps(rendered).lower()
