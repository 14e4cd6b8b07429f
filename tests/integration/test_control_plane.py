"""The control plane that other tests rely on: it is real, it is ours alone, and nothing of it outlives us."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from control_plane.accounts import make_account, make_namespace
from control_plane.binaries import find_binaries, read_sources
from control_plane.children import ChildError
from control_plane.kube_http import KubeHttp, Object
from control_plane.plane import ControlPlane
from control_plane.recipe import kubernetes_version
from integration.harness import eventually
from integration.processes import descendants, env_with_tests, is_port_free, is_running

pytestmark = [pytest.mark.control_plane, pytest.mark.slow]  # every other test of the operator stands on it

PARENT: Final = Path(__file__).with_name("control_plane_parent.py")


@pytest.fixture
def namespace(control_plane: ControlPlane) -> str:
    return make_namespace(control_plane.admin)


def deployment(name: str, replicas: int) -> Object:
    labels = {"app": name}
    container = {"name": "c", "image": "none:1"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def names(admin: KubeHttp, path: str) -> list[str]:
    return [one["metadata"]["name"] for one in admin.get(path)["items"]]


def test_it_is_the_kubernetes_that_go_mod_names(control_plane: ControlPlane) -> None:
    assert control_plane.admin.get("/version")["gitVersion"] == f"v{kubernetes_version(read_sources().go_mod)}"


def test_controllers_make_pods_of_a_deployment_and_take_them_away(control_plane: ControlPlane, namespace: str) -> None:
    admin, pods = control_plane.admin, f"/api/v1/namespaces/{namespace}/pods"
    deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    admin.create(deployments, deployment("d", 2))
    assert eventually(lambda: len(names(admin, pods)) == 2)
    admin.delete(f"{deployments}/d")
    assert eventually(lambda: names(admin, pods) == [])


def test_without_controllers_nothing_moves_and_afterwards_all_that_was_asked_for(
    control_plane: ControlPlane, namespace: str
) -> None:
    admin, pods = control_plane.admin, f"/api/v1/namespaces/{namespace}/pods"
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    with control_plane.without_controllers():
        made = admin.create(path, deployment("d", 1))
        assert not eventually(lambda: names(admin, pods) != [], timeout_s=1)
        assert admin.get(f"{path}/d")["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert eventually(lambda: names(admin, pods) != [])


def test_a_namespace_that_is_deleted_goes_with_all_that_it_holds(control_plane: ControlPlane, namespace: str) -> None:
    admin = control_plane.admin
    admin.create(
        f"/api/v1/namespaces/{namespace}/configmaps",
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one", "finalizers": []}},
    )
    admin.delete(f"/api/v1/namespaces/{namespace}")
    assert eventually(lambda: admin.ask("GET", f"/api/v1/namespaces/{namespace}").status == 404)


def test_an_account_may_do_what_its_role_says_and_no_more(control_plane: ControlPlane, namespace: str) -> None:
    make_account(
        control_plane.admin,
        namespace,
        "reader",
        [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}],
    )
    reader = control_plane.as_account(namespace, "reader")
    assert reader.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps").status == 200
    refused = reader.ask("GET", f"/api/v1/namespaces/{namespace}/secrets")
    assert refused.status == 403
    assert f"system:serviceaccount:{namespace}:reader" in refused.complaints[0]
    assert reader.ask("GET", "/api/v1/namespaces/default/configmaps").status == 403


@pytest.mark.parametrize("token", ["", "wrong"])
def test_who_is_nobody_may_ask_nothing(control_plane: ControlPlane, token: str) -> None:
    assert replace(control_plane.admin, token=token).ask("GET", "/version").status == 401


def test_a_restarted_api_server_has_its_address_its_objects_and_its_tokens(
    control_plane: ControlPlane, namespace: str
) -> None:
    make_account(control_plane.admin, namespace, "reader", [])
    reader = control_plane.as_account(namespace, "reader")
    before = control_plane.pids()
    control_plane.restart_api_server()
    after = control_plane.pids()
    assert {name for name in before if before[name] != after[name]} == {"api-server"}
    assert namespace in names(control_plane.admin, "/api/v1/namespaces")
    assert reader.ask("GET", f"/api/v1/namespaces/{namespace}/pods").status == 403  # known, without rights


def test_while_the_api_server_is_down_nobody_answers_at_its_address(control_plane: ControlPlane) -> None:
    control_plane.kill_api_server()
    try:
        with pytest.raises(ConnectionRefusedError):
            control_plane.admin.get("/version")
    finally:
        control_plane.start_api_server()


def test_controllers_go_on_after_the_api_server_came_back(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.restart_api_server()
    admin = control_plane.admin
    admin.create(f"/apis/apps/v1/namespaces/{namespace}/deployments", deployment("d", 1))
    assert eventually(lambda: names(admin, f"/api/v1/namespaces/{namespace}/pods") != [])


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(PARENT), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env_with_tests()) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "ready\n"
            children = descendants(parent.pid)
        finally:
            parent.kill()
    assert len(children) == 3
    assert eventually(lambda: not any(map(is_running, children)))


def test_a_closed_one_leaves_no_process_and_no_port(tmp_path: Path) -> None:
    with ControlPlane(find_binaries(os.environ), tmp_path) as plane:
        pids = plane.pids().values()
        port = int(plane.url.rpartition(":")[2])
        assert not is_port_free(port)
    assert len(pids) == 3
    assert not any(map(is_running, pids))
    assert is_port_free(port)


def test_a_program_that_dies_is_an_error_with_its_last_words_and_takes_the_others_along(tmp_path: Path) -> None:
    broken = tmp_path / "kube-apiserver"
    broken.write_text("#!/bin/sh\necho cannot read my flags\nexit 3\n")
    broken.chmod(0o755)
    folder = tmp_path / "plane"
    folder.mkdir()
    before = descendants(os.getpid())
    plane = ControlPlane(replace(find_binaries(os.environ), api_server=broken), folder)
    with pytest.raises(ChildError, match="kube-apiserver ended with 3:\ncannot read my flags"):
        plane.__enter__()
    assert "etcd.log" in {file.name for file in folder.iterdir()}
    assert descendants(os.getpid()) <= before
