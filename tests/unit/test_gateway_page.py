"""The page on gateways: its example for Kubernetes names what the operator makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from fakes.operator_cluster import FakeCluster
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.manifests.pool import Document
from pdcluster_operator.core.seen.observed import Observed

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = ROOT / "docs" / "gateway-kubernetes.yaml"
OBJECTS: Final[dict[str, Any]] = {one["kind"]: one for one in yaml.safe_load_all(EXAMPLE.read_text())}
POOL: Final[dict[str, Any]] = OBJECTS["InferencePool"]["spec"]
PICKER: Final[dict[str, Any]] = OBJECTS["PDCluster"]["spec"]["router"]["picker"]


def children() -> dict[tuple[str, str], Document]:
    """What the operator makes of the example's PDCluster."""
    cluster = PDCluster.from_wire(OBJECTS["PDCluster"])
    plan = FakeCluster().plan_for(cluster, Observed(has_leader_worker_sets=True))
    assert plan.facts.refusal == ""
    found = [child.document for child in plan.children]
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def test_the_pool_is_the_example_that_one_starts_with_and_has_a_picker() -> None:
    started = yaml.safe_load((ROOT / "examples" / "cpu.yaml").read_text())
    started["spec"]["router"]["picker"] = PICKER
    assert OBJECTS["PDCluster"]["spec"] == started["spec"]
    assert OBJECTS["PDCluster"]["metadata"]["name"] == started["metadata"]["name"]


def test_the_inference_pool_names_the_service_and_the_port_for_gateways() -> None:
    reference = POOL["endpointPickerRef"]
    ports = {port["port"]: port for port in children()["Service", reference["name"]]["spec"]["ports"]}
    assert ports[reference["port"]["number"]]["name"] == "picker"
    assert ports[reference["port"]["number"]]["appProtocol"] == "http2"
    assert reference["failureMode"] == "FailClose"


def test_the_inference_pool_finds_decode_engines_alone_and_where_they_answer() -> None:
    selector, made = POOL["selector"]["matchLabels"].items(), children()
    engines = [one["spec"]["template"] for (kind, _), one in made.items() if kind == "Deployment"]
    found = [pod for pod in engines if selector <= pod["metadata"]["labels"].items()]
    assert [pod["metadata"]["labels"]["pdcluster.dev/role"] for pod in found] == ["decode"]
    assert len(engines) == 3
    (container,) = found[0]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [port["number"] for port in POOL["targetPorts"]] == [ports["http"]]


def test_the_head_says_where_the_gateways_pods_run_and_whose_routes_their_listener_allows() -> None:
    head, _, _ = EXAMPLE.read_text().partition("apiVersion:")
    (gateway,), (namespace,) = OBJECTS["HTTPRoute"]["spec"]["parentRefs"], PICKER["gatewayNamespaces"]
    assert f"The Gateway `{gateway['name']}` and its pods are in the namespace `{namespace}`." in head
    assert "allow routes from the pool's" in head
    assert "(allowedRoutes)" in head


def test_certificates_of_gateways_and_pickers_have_an_issuer_of_their_own() -> None:
    head, _, _ = EXAMPLE.read_text().partition("apiVersion:")
    assert f"by its ClusterIssuer `{OBJECTS['Certificate']['spec']['issuerRef']['name']}`, which issues" in head


def test_the_route_leads_from_a_gateway_that_may_come_in_to_the_inference_pool() -> None:
    route = OBJECTS["HTTPRoute"]["spec"]
    assert [one["namespace"] for one in route["parentRefs"]] == PICKER["gatewayNamespaces"]
    (backend,) = route["rules"][0]["backendRefs"]
    pool = OBJECTS["InferencePool"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(f"{backend['group']}/")


def test_the_certificate_has_the_names_by_which_gateways_call_and_is_put_where_routers_read() -> None:
    spec = OBJECTS["Certificate"]["spec"]
    assert spec["secretName"] == PICKER["tls"]["secretName"]
    service = f"{POOL['endpointPickerRef']['name']}.{OBJECTS['PDCluster']['metadata']['namespace']}.svc"
    assert spec["dnsNames"] == [service, f"{service}.cluster.local"]
    assert {one["metadata"]["namespace"] for one in OBJECTS.values()} == {"default"}
