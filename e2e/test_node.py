"""The cluster itself: what the stories stand on. No engine, no operator; a few seconds."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import pytest

from e2e.cluster import Cluster, eventually
from e2e.pool import ENGINE_IMAGE

Object = dict[str, Any]

NAME: Final = "echo"
NAMESPACE: Final = "default"
LABELS: Final = {"app": NAME}
START_S: Final = 120.0
PROGRAM: Final = """
import http.server, os
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = os.environ["POD_NAME"].encode()
        self.send_response(200)
        self.send_header("content-length", str(len(name)))
        self.end_headers()
        self.wfile.write(name)
http.server.ThreadingHTTPServer(("", 8000), Page).serve_forever()
"""


def deployment() -> Object:
    """Two pods as strict as the product's, that say their names."""
    container = {
        "name": NAME,
        "image": ENGINE_IMAGE,
        "command": ["python3", "-c", PROGRAM],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    security = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"containers": [container], "securityContext": security, "terminationGracePeriodSeconds": 1}
    template = {"metadata": {"labels": LABELS}, "spec": pod}
    spec = {"replicas": 2, "selector": {"matchLabels": LABELS}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME}, "spec": spec}


def service() -> Object:
    spec = {"selector": LABELS, "ports": [{"port": 80, "targetPort": 8000}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": spec}


@pytest.fixture(scope="module")
def echo(cluster: Cluster) -> Iterator[str]:
    """The Service's URL."""
    cluster.apply(deployment())
    cluster.apply(service())
    try:
        cluster.wait(f"deployment/{NAME}", "condition=Available", NAMESPACE, START_S)
        url = f"http://{cluster.get('service', NAME, NAMESPACE)['spec']['clusterIP']}"
        eventually(lambda: answers(url), "kube-proxy has no rules for the Service", START_S)
        yield url
    finally:
        cluster.run("-n", NAMESPACE, "delete", f"deployment/{NAME}", f"service/{NAME}")


def pods(cluster: Cluster) -> set[str]:
    found = cluster.items("pods", NAMESPACE, f"app={NAME}")
    return {pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]}


def answers(url: str) -> bool:
    try:
        return bool(answer(url))
    except OSError:
        return False


def answer(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as found:
        text: str = found.read().decode()
    return text


def test_a_service_reaches_all_its_pods_from_the_node(cluster: Cluster, echo: str) -> None:
    wanted, seen = pods(cluster), set[str]()

    def has_seen_all() -> bool:
        with suppress(OSError):
            seen.add(answer(echo))
        return seen == wanted

    assert len(wanted) == 2
    eventually(has_seen_all, f"only {seen} of {wanted} answered", START_S)


def test_a_pod_finds_a_service_by_its_name_and_the_api_server_by_its_own(cluster: Cluster, echo: str) -> None:
    ask = f"import urllib.request; print(urllib.request.urlopen('http://{NAME}.{NAMESPACE}.svc', timeout=10).read())"
    name = min(pods(cluster))
    assert NAME in cluster.run("-n", NAMESPACE, "exec", name, "--", "python3", "-c", ask)
    look = "import socket; print(socket.gethostbyname('kubernetes.default.svc'))"
    found = cluster.run("-n", NAMESPACE, "exec", name, "--", "python3", "-c", look).strip()
    assert found == cluster.get("service", "kubernetes", NAMESPACE)["spec"]["clusterIP"]


def test_a_killed_container_is_started_again_in_its_pod(cluster: Cluster, echo: str) -> None:
    name = min(pods(cluster))

    def num_restarts() -> int:
        return int(cluster.get("pod", name, NAMESPACE)["status"]["containerStatuses"][0]["restartCount"])

    assert num_restarts() == 0
    cluster.kill(NAMESPACE, name, NAME)
    if cluster.node is None:
        eventually(lambda: name not in pods(cluster) and len(pods(cluster)) == 2, "no new pod", START_S)
    else:
        eventually(lambda: num_restarts() == 1, "it is not started again", START_S)
