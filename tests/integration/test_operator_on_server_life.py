"""A pool's life on a real API server: made, looked at again, taken away. The operator is a process with the chart's
rights; controllers are Kubernetes' own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.audit import Right
from control_plane.kube_http import Object
from fakes.certificates import Authority
from integration.harness import eventually
from operator_on_server.process import OperatorProcess
from operator_on_server.server import KINDS, READY_LIMIT_S, STILL_S, Pool, Server, running_server
from patience import PATIENCE_S

pytestmark = pytest.mark.control_plane


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("life")) as found:
        yield found


@pytest.fixture
def operator(server: Server) -> Iterator[OperatorProcess]:
    with server.operator() as process:
        yield process
        process.check()


def nothing_is_left(pool: Pool) -> bool:
    return not any(pool.all_of(plural) for plural in KINDS)


def test_from_apply_to_ready_with_all_its_children(server: Server, operator: OperatorProcess) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        found = Counter(one.partition("/")[0] for one in pool.wait_still())
        assert found == {
            "pdclusters": 1,
            "deployments": 3,
            "replicasets": 3,
            "pods": 3,
            "services": 4,
            "endpointslices": 4,
            "secrets": 1,
            "serviceaccounts": 2,
            "roles": 1,
            "rolebindings": 1,
            "networkpolicies": 3,
            "poddisruptionbudgets": 3,
        }
        assert pool.condition("TransferVerified")["reason"] == "Verified"
        assert server.routers.refusals == []
        assert [event for event in pool.events() if event.startswith("Normal Serving")]


def test_a_pool_with_tls_inside_waits_for_its_secret_and_is_verified_over_tls(
    server: Server, operator: OperatorProcess, tmp_path: Path
) -> None:
    with server.pool({"spec.tls": {"secretName": "inside", "serverName": "inside.example"}}) as pool:
        assert eventually(lambda: "Secret" in pool.condition("RouterReady").get("message", ""))
        authority = Authority(tmp_path / "ca.crt")
        issued = authority.issue(usage=None, names=("inside.example",))
        server.routers.tls = issued.server(tmp_path / "router")
        files = {"tls.crt": issued.pem, "tls.key": issued.key_pem(), "ca.crt": authority.ca.read_bytes()}
        secret = {"stringData": {key: text.decode() for key, text in files.items()}, "metadata": {"name": "inside"}}
        server.admin.create(pool.list_path("secrets"), {"apiVersion": "v1", "kind": "Secret", **secret})
        server.routers.schemes.clear()
        pool.wait_ready()
        assert set(server.routers.schemes) == {"https"}
        ports = [port for one in pool.all_of("services") for port in one["spec"]["ports"]]
        assert [port.get("appProtocol") for port in ports].count("https") == 3
        assert server.routers.refusals == []


def test_the_port_for_gateways_comes_with_its_field_and_goes_with_it(server: Server, operator: OperatorProcess) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        engines = [pool.engines(role) for role in ("prefill", "decode")]
        tls = {"secretName": "shown", "clientCertificates": True}
        pool.merge({"router": {"picker": {"gatewayNamespaces": ["gateways"], "tls": tls}}})
        assert eventually(lambda: "no Secret" in pool.condition("RouterReady").get("message", ""))
        secret = {"stringData": dict.fromkeys(("tls.crt", "tls.key", "ca.crt"), "x"), "metadata": {"name": "shown"}}
        server.admin.create(pool.list_path("secrets"), {"apiVersion": "v1", "kind": "Secret", **secret})
        pool.wait_ready()
        assert eventually(lambda: gateway_ports(pool) == (["http2"], [8000, 9002]))
        pool.merge({"router": {"picker": None}})
        assert eventually(lambda: gateway_ports(pool) == ([], []))
        pool.wait_ready()
        assert [pool.engines(role) for role in ("prefill", "decode")] == engines


@pytest.mark.costly
def test_gateways_have_the_old_routers_until_a_new_one_with_tls_is_ready(
    server: Server, operator: OperatorProcess
) -> None:
    with server.pool({"spec.router.picker": {"gatewayNamespaces": ["gateways"]}}) as pool:
        pool.wait_ready()
        secret = {"stringData": dict.fromkeys(("tls.crt", "tls.key"), "x"), "metadata": {"name": "shown"}}
        server.admin.create(pool.list_path("secrets"), {"apiVersion": "v1", "kind": "Secret", **secret})
        server.node.never_ready = speaks_tls
        try:
            pool.merge({"router": {"picker": {"tls": {"secretName": "shown"}}}})
            assert eventually(
                lambda: "to the old ones, in the clear" in pool.condition("RouterReady").get("message", "")
            )
            assert eventually(lambda: any(speaks_tls(pod) for pod in pool.all_of("pods")))
            pool.wait_still()
            assert gateway_ports(pool)[0] == ["kubernetes.io/h2c"]
            assert num_pickers(pool) == 1
        finally:
            server.node.never_ready = lambda pod: False
        assert eventually(lambda: (gateway_ports(pool)[0], num_pickers(pool)) == (["http2"], 1))
        assert eventually(lambda: pool.condition("RouterReady").get("message") == "1 of 1 routers are ready")
        assert (gateway_ports(pool)[0], num_pickers(pool)) == (["http2"], 1)


def speaks_tls(pod: Object) -> bool:
    """Whether it is a router's pod with TLS for gateways."""
    return any(port["name"] == "picker-tls" for port in pod["spec"]["containers"][0].get("ports", ()))


def num_pickers(pool: Pool) -> int:
    """Routers to which Kubernetes leads gateways."""
    slices = [one for one in pool.all_of("endpointslices") if any(p["port"] == 9002 for p in one["ports"] or ())]
    return sum(bool(found["conditions"]["ready"]) for one in slices for found in one["endpoints"])


def gateway_ports(pool: Pool) -> tuple[list[str], list[int]]:
    """How Services say that gateways speak on port 9002, and the ports that policies open to namespaces of gateways."""
    ports = [port for one in pool.all_of("services") for port in one["spec"]["ports"]]
    rules = [rule for one in pool.all_of("networkpolicies") for rule in one["spec"]["ingress"]]
    opened = [rule["ports"][0]["port"] for rule in rules if "gateways" in json.dumps(rule)]
    return [port["appProtocol"] for port in ports if port["port"] == 9002], sorted(opened)


def test_a_ready_pool_costs_no_write_and_a_look_at_it_asks_for_nothing(
    server: Server, operator: OperatorProcess
) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        before, since = pool.wait_still(quiet_s=STILL_S), server.mark()
        # Any change of a pod is news for its PDCluster: this one has nothing to do with the plan.
        [pod, *_] = [one["metadata"]["name"] for one in pool.all_of("pods") if "decode" in one["metadata"]["name"]]
        pool.label(f"{pool.list_path('pods')}/{pod}", {"team": "inference"})
        assert not eventually(lambda: bool(server.writes(since)), timeout_s=3)
        after = pool.versions()
        assert {name for name in before if before[name] != after[name]} == {f"pods/{pod}"}
        asked = {one.right for one in server.records(since)}
        assert {right for right in asked if right.resource != "leases" and right.verb != "watch"} == set()


def test_the_next_operator_finds_nothing_to_change(server: Server) -> None:
    with server.operator() as first, server.pool() as pool:
        pool.wait_ready()
        before = pool.wait_still(quiet_s=STILL_S)
        num_orders = len(server.routers.orders)
        first.kill()
        since = server.mark()
        with server.operator() as second:
            second.wait_leading()
            # It applies each child once, for it cannot know what the first one applied; the server finds it the same.
            applied = Right("networking.k8s.io", "networkpolicies", "patch")
            assert eventually(lambda: applied in {one.right for one in server.writes(since)}, timeout_s=READY_LIMIT_S)
            after = pool.wait_still(quiet_s=STILL_S)
            verbs = {one.right.verb for one in server.writes(since)}
            resources = {one.right.resource for one in server.writes(since)}
        assert after == before
        assert verbs == {"patch"}
        assert not resources & {"events", "pdclusters/status"}
        assert len(server.routers.orders) == num_orders


def test_after_its_deletion_nothing_is_left_of_a_pool(server: Server, operator: OperatorProcess) -> None:
    with server.pool({"spec.scaling": {"mode": "External"}}) as pool:
        pool.wait_ready()
        assert len(pool.all_of("pdrolescalers")) == 2
        since = server.mark()
        server.admin.delete(pool.path)
        assert eventually(lambda: nothing_is_left(pool), timeout_s=READY_LIMIT_S, poll_s=0.2), pool.versions()
        assert not eventually(lambda: not nothing_is_left(pool), timeout_s=2, poll_s=0.2), "it was made again"
        assert [one for one in server.records(since) if one.code >= 400] == []


@pytest.mark.slow
def test_a_pool_that_is_made_anew_under_its_old_name_gets_children_of_its_own(
    server: Server, operator: OperatorProcess
) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        old = pool.read()["metadata"]["uid"]
        server.admin.delete(pool.path)
        with server.pool(namespace=pool.namespace) as again:
            again.wait_ready()
            owners = {
                owner["uid"]
                for plural in ("deployments", "services", "secrets", "roles")
                for one in again.all_of(plural)
                for owner in one["metadata"]["ownerReferences"]
            }
            assert owners == {again.read()["metadata"]["uid"]}
            assert old not in owners


@pytest.mark.costly
def test_from_a_laptop_an_operator_leads_and_people_look_by_a_kubeconfig(server: Server, tmp_path: Path) -> None:
    where = ["--kubeconfig", str(server.plane.kubeconfig_file)]
    with server.operator(is_on_a_laptop=True) as operator, server.pool() as pool:
        operator.wait_leading()
        pool.wait_ready()
        told = run_pdcluster("explain", pool.name, "-n", pool.namespace, *where)
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout.startswith("Ready: ")
        file = tmp_path / "pool.json"
        file.write_text(json.dumps(pool.read() | {"status": {}}))
        plan = run_pdcluster("plan", "-f", str(file), "--from-cluster", *where)
        assert (plan.returncode, plan.stderr) == (0, "")
        assert "no engine is replaced" in plan.stdout
    missing = run_pdcluster("explain", "absent", *where)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert 'pdclusters.pdcluster.dev "absent" not found' in missing.stderr


def run_pdcluster(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdcluster_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
