"""The rights that the chart gives are exactly those that the operator needs: none is missing, and none is idle.

A whole life of a pool, with the chart's account; then the API server's audit log is held against the chart's rules.
OwnerReferencesPermissionEnforcement is on, as on OpenShift.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Final

import pytest

from chart_cases.rendering import NAMESPACE, objects, rights
from control_plane.audit import Record, Right, read_records
from control_plane.children import Child
from control_plane.kube_http import MERGE_PATCH, Object
from integration.harness import eventually
from integration.ports import fresh_port
from operator_cases.objects import scaler
from operator_on_server.groups import API, SETS, PlayedGroups, install_groups
from operator_on_server.server import READY_LIMIT_S, Pool, Server, running_server
from pdcluster_protocol.secret import SECRET_VARIABLE

pytestmark = pytest.mark.control_plane

RULES_PATH: Final = "/apis/rbac.authorization.k8s.io/v1/clusterroles/pdcluster-operator"
MODES: Final = {"default": (), "namespaced": ("team-a", "team-b")}
"""Cases of the chart, and the namespaces that it has rights in; none: in all."""


@contextmanager
def server_of(folder: Path, case: str) -> Iterator[Server]:
    with ExitStack() as stack:
        admission = ("OwnerReferencesPermissionEnforcement",)
        server = stack.enter_context(running_server(folder, case=case, namespaces=MODES[case], admission=admission))
        install_groups(server.admin)
        stack.callback(PlayedGroups(server.admin).close)
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(tmp_path_factory.mktemp("rights"), "default") as found:
        yield found


def granted(case: str) -> set[Right]:
    """All that the chart's rules give to the operator, but what only the API server asks for."""
    rules = [rule for one in objects(case) if one["kind"] in ("Role", "ClusterRole") for rule in _operators(one)]
    return _rights_in(rules) - _rights_in([rule for rule in rights()["watched"] if rule.get("askedBy") == "server"])


def _operators(role: Object) -> list[Object]:
    """Rules of a role that is the operator's, not its users'."""
    is_ours = role["metadata"]["name"].startswith("pdcluster-operator")
    return role["rules"] if is_ours else []


def _rights_in(rules: list[Object]) -> set[Right]:
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(records: list[Record]) -> set[Right]:
    return {right for record in records for right in record.rights}


def forbidden(records: list[Record]) -> list[Record]:
    return [record for record in records if record.code in (401, 403)]


def is_refused(pool: Pool) -> bool:
    return pool.condition("Accepted").get("reason") == "Refused"


def live_a_whole_life(server: Server, pool: Pool) -> None:
    """Everything that users, autoscalers and strangers do, one after the other."""
    pool.wait_ready()
    pool.merge({"roles": {"decode": {"replicas": 2}}, "router": {"replicas": 2}})
    pool.wait_ready()
    pool.merge({"image": "engine:2"})  # a new revision
    pool.wait_ready()
    scale_by_autoscaler(server, pool)
    run_on_several_nodes(server, pool)
    server.admin.delete(pool.path)
    assert eventually(lambda: not pool.all_of("deployments"), timeout_s=READY_LIMIT_S)


def scale_by_autoscaler(server: Server, pool: Pool) -> None:
    path = f"{pool.list_path('pdrolescalers')}/{pool.name}-decode"
    stranger = scaler({"metadata.namespace": pool.namespace, "metadata.name": f"{pool.name}-decode"})
    server.admin.create(pool.list_path("pdrolescalers"), stranger)
    pool.merge({"scaling": {"mode": "External"}})
    assert eventually(lambda: is_refused(pool), timeout_s=READY_LIMIT_S)
    server.admin.delete(path)
    pool.wait_ready()
    answer = server.admin.ask("PATCH", f"{path}/scale", {"spec": {"replicas": 1}}, content_type=MERGE_PATCH)
    assert not answer.complaints, answer
    assert eventually(
        lambda: (server.admin.get(path).get("status") or {}).get("replicas") == 1, timeout_s=READY_LIMIT_S
    )
    pool.merge({"scaling": {"mode": "Fixed"}})
    assert eventually(lambda: not pool.all_of("pdrolescalers"), timeout_s=READY_LIMIT_S)
    pool.wait_ready()


def run_on_several_nodes(server: Server, pool: Pool) -> None:
    """Groups come, grow, are labelled by somebody, and go; then a stranger's is in their place."""
    path = f"{SETS}/namespaces/{pool.namespace}/leaderworkersets"
    pool.merge({"roles": {"decode": {"parallelism": {"tensor": 2}, "nodesPerInstance": 2, "replicas": 1}}})
    pool.wait_ready()
    pool.merge({"roles": {"decode": {"replicas": 2}}})
    pool.wait_ready()
    [name] = [one["metadata"]["name"] for one in server.admin.get(path)["items"]]
    pool.label(f"{path}/{name}", {"team": "inference"})  # it differs from what was applied, so it is applied again
    applied = Right("leaderworkerset.x-k8s.io", "leaderworkersets", "patch")
    assert eventually(lambda: applied in used(server.records()), timeout_s=READY_LIMIT_S)
    pool.merge({"roles": {"decode": {"nodesPerInstance": 1, "replicas": 1}}})
    pool.wait_ready()
    assert eventually(lambda: not server.admin.get(path)["items"], timeout_s=READY_LIMIT_S)
    stranger = {"metadata": {"name": name}, "spec": {"leaderWorkerTemplate": {"workerTemplate": {}}, "replicas": 0}}
    server.admin.create(path, {"apiVersion": API, "kind": "LeaderWorkerSet", **stranger})
    pool.merge({"roles": {"decode": {"nodesPerInstance": 2}}})
    assert eventually(lambda: is_refused(pool), timeout_s=READY_LIMIT_S)
    server.admin.delete(f"{path}/{name}")
    pool.wait_ready()


def check_rights(server: Server) -> None:
    records = server.records()
    assert forbidden(records) == []
    assert granted(server.case) - used(records) == set(), "nothing asked for these rights: take them from the chart"
    assert server.routers.refusals == []


@pytest.mark.slow
def test_the_operator_needs_all_its_rights_and_no_other(server: Server) -> None:
    with server.operator() as process, server.pool() as pool:
        live_a_whole_life(server, pool)
        process.check()
    check_rights(server)


@pytest.mark.slow
def test_with_rights_in_some_namespaces_it_needs_all_of_them_and_no_other(tmp_path: Path) -> None:
    with server_of(tmp_path, "namespaced") as server:
        with server.operator() as process, server.pool(namespace="team-a") as pool, server.pool() as elsewhere:
            live_a_whole_life(server, pool)
            process.check()
            assert "status" not in elsewhere.read()
        check_rights(server)
        namespaces = {record.namespace for record in server.records()}
    assert namespaces == {NAMESPACE, "team-a", "team-b"}


LACKS: Final = {
    "events": Right("", "events", "create"),
    # Those that no call of ours has: the server itself asks, beside these calls. The first is a dry run.
    "pdclusters/finalizers": Right("apps", "deployments", "create"),
    "endpointslices": Right("rbac.authorization.k8s.io", "roles", "patch"),
}
"""A resource that is taken out of the chart's rules, and the call that is then forbidden."""


@pytest.mark.parametrize(
    "resource", ["events", *(pytest.param(name, marks=pytest.mark.slow) for name in LACKS if name != "events")]
)
def test_a_right_that_is_missing_is_found_in_the_audit_log(server: Server, resource: str) -> None:
    role = server.admin.get(RULES_PATH)
    less = deepcopy(role["rules"])
    for rule in less:
        rule["resources"] = [one for one in rule["resources"] if one != resource]
    left = {"rules": [rule for rule in less if rule["resources"]]}
    server.admin.ask("PATCH", RULES_PATH, left, content_type=MERGE_PATCH)
    try:
        since = server.mark()
        with server.operator() as process, server.pool():
            process.wait_leading()
            assert eventually(lambda: bool(forbidden(server.records(since))), timeout_s=READY_LIMIT_S)
            assert LACKS[resource] in used(forbidden(server.records(since)))
    finally:
        server.admin.ask("PATCH", RULES_PATH, {"rules": role["rules"]}, content_type=MERGE_PATCH)


@pytest.mark.costly
def test_routers_need_all_their_rights_and_no_other(server: Server, tmp_path: Path) -> None:
    with server.operator(), server.pool() as pool:
        pool.wait_ready()
        [role] = pool.all_of("roles")
        name = role["metadata"]["name"]
        token = tmp_path / "token"
        token.write_text(server.plane.token_for(pool.namespace, name))
        where = [f"--namespace={pool.namespace}", f"--cluster={pool.name}", f"--kube-api={server.plane.url}"]
        who = [f"--kube-ca-file={server.plane.ca_file}", f"--kube-token-file={token}"]
        command: list[str | Path] = [
            "/usr/bin/env",
            f"{SECRET_VARIABLE}={'0' * 64}",
            sys.executable,
            "-m",
            "pdcluster_router",
        ]
        port = ["--host=127.0.0.1", f"--port={fresh_port()}", "--discovery=kubernetes"]
        router = Child([*command, *port, *where, *who], tmp_path / "router.log")
        try:
            file, user = server.plane.audit_file, f"{pool.namespace}:{name}"

            def is_used_up() -> bool:
                router.check()
                return used(read_records(file, user)) == _rights_in(role["rules"])

            assert eventually(is_used_up, timeout_s=READY_LIMIT_S), used(read_records(file, user))
            assert forbidden(read_records(file, user)) == []
        finally:
            router.kill()
