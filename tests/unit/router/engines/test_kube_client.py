"""What a pod is told of its API server, and what is not there outside of one."""

from __future__ import annotations

from pathlib import Path

from pdcluster_router.engines.kube_client import api_server_of


def test_outside_of_a_pod_nothing_is_known(tmp_path: Path) -> None:
    assert api_server_of({"KUBERNETES_SERVICE_HOST": ""}, tmp_path / "none") == {}


def test_a_pod_without_a_token_still_knows_where_the_api_server_is(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert api_server_of(environ, tmp_path) == {"kube_api": "https://10.96.0.1:6443"}
