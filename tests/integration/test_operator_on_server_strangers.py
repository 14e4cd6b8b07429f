"""Others write to our children, or an add-on is missing: the user is told who and what, it heals, nothing freezes."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest

from control_plane.kube_http import MERGE_PATCH, Object
from integration.harness import eventually
from operator_on_server.groups import SETS, PlayedGroups, install_groups
from operator_on_server.process import OperatorProcess
from operator_on_server.server import READY_LIMIT_S, STILL_S, Pool, Server, running_server

pytestmark = pytest.mark.control_plane

WATCHED_S: Final = 4.0
"""Long enough for an operator that fights: its looks are at first a second apart."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("strangers")) as found:
        yield found


@pytest.fixture
def operator(server: Server) -> Iterator[OperatorProcess]:
    with server.operator() as process:
        yield process
        process.check()


def is_refused(pool: Pool) -> bool:
    return pool.condition("Accepted").get("reason") == "Refused"


def router_service(pool: Pool) -> str:
    return f"{pool.list_path('services')}/{pool.name}-router"


def apply_as(server: Server, manager: str, path: str, spec: Object) -> None:
    """Somebody else applies a part of an object, and takes what he finds."""
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": path.rpartition("/")[2]}, "spec": spec}
    server.admin.apply(path, body, manager=manager)


def edit_as(server: Server, manager: str, path: str, spec: Object) -> None:
    """As ``kubectl edit`` does."""
    answer = server.admin.ask("PATCH", path, {"spec": spec}, content_type=MERGE_PATCH, fieldManager=manager)
    assert not answer.complaints, answer


@pytest.mark.costly
@pytest.mark.parametrize(
    "take", [pytest.param(apply_as, id="by apply"), pytest.param(edit_as, id="by edit", marks=pytest.mark.slow)]
)
def test_a_field_of_ours_that_somebody_took_is_taken_back_and_told_once(
    server: Server, operator: OperatorProcess, take: Callable[[Server, str, str, Object], None]
) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        take(server, "gitops", router_service(pool), {"type": "NodePort"})
        assert eventually(lambda: service_type(server, pool) == "ClusterIP", timeout_s=READY_LIMIT_S)
        assert eventually(lambda: len(taken_back(pool)) == 1, timeout_s=READY_LIMIT_S)
        [told] = taken_back(pool)
        for word in ("Service", "pool-router", "gitops", ".spec.type"):
            assert word in told
        pool.wait_ready()
        before, since = pool.wait_still(quiet_s=STILL_S), server.mark()
        assert not eventually(lambda: pool.versions() != before, timeout_s=WATCHED_S), "it is written to at rest"
        assert server.writes(since) == []


@pytest.mark.slow
def test_routers_that_somebody_scales_go_back_and_the_engines_scale_meanwhile(
    server: Server, operator: OperatorProcess
) -> None:
    """``kubectl scale``, or an autoscaler on the wrong object."""
    with server.pool() as pool:
        pool.wait_ready()
        [name] = pool.engines("decode")
        routers = f"{pool.list_path('deployments')}/{pool.name}-router"
        answer = server.admin.ask("PATCH", f"{routers}/scale", {"spec": {"replicas": 3}}, content_type=MERGE_PATCH)
        assert not answer.complaints
        pool.merge({"roles": {"decode": {"replicas": 2}}})
        assert eventually(lambda: server.admin.get(routers)["spec"]["replicas"] == 1, timeout_s=READY_LIMIT_S)
        pool.wait_ready()
        assert pool.engines("decode") == {name: 2}
        assert len(taken_back(pool)) == 1


@pytest.mark.slow
def test_who_insists_on_a_field_of_ours_is_written_against_no_more_than_once_a_second(
    server: Server, operator: OperatorProcess
) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        num_taken = 0
        until = time.monotonic() + 3 * WATCHED_S
        while time.monotonic() < until:
            if service_type(server, pool) != "NodePort":
                edit_as(server, "gitops", router_service(pool), {"type": "NodePort"})
                num_taken += 1
            time.sleep(0.05)
        # The first two come as fast as events do, the others at the pace of failures.
        assert 2 < num_taken <= 3 * WATCHED_S + 2
        assert len(taken_back(pool)) == 1
        pool.wait_ready()


def service_type(server: Server, pool: Pool) -> str:
    return str(server.admin.get(router_service(pool))["spec"]["type"])


def taken_back(pool: Pool) -> list[str]:
    return [event for event in pool.events() if event.startswith("Warning TakenBack")]


def test_what_others_add_beside_our_fields_is_theirs(server: Server, operator: OperatorProcess) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        apply_as(server, "gitops", router_service(pool), {"sessionAffinity": "ClientIP"})
        pool.label(router_service(pool), {"team": "inference"})
        pool.wait_still()
        pool.merge({"router": {"replicas": 2}})
        pool.wait_ready()
        found = server.admin.get(router_service(pool))
        assert (found["spec"]["sessionAffinity"], found["metadata"]["labels"]["team"]) == ("ClientIP", "inference")


@pytest.mark.slow
def test_replicas_that_somebody_moved_by_hand_are_moved_back_once(server: Server, operator: OperatorProcess) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        [name] = pool.engines("decode")
        path = f"{pool.list_path('deployments')}/{name}"
        pool.wait_still()
        generation = server.admin.get(path)["metadata"]["generation"]
        answer = server.admin.ask("PATCH", f"{path}/scale", {"spec": {"replicas": 3}}, content_type=MERGE_PATCH)
        assert not answer.complaints
        assert eventually(lambda: pool.engines("decode") == {name: 1}, timeout_s=READY_LIMIT_S)
        pool.wait_ready()
        pool.wait_still()
        assert server.admin.get(path)["metadata"]["generation"] == generation + 2, "once there, once back"


@pytest.mark.slow
def test_what_somebody_deleted_is_made_again(server: Server, operator: OperatorProcess) -> None:
    with server.pool() as pool:
        pool.wait_ready()
        before = pool.wait_still().keys()
        path = f"{pool.list_path('networkpolicies')}/{pool.name}-decode"
        uid = server.admin.get(path)["metadata"]["uid"]
        server.admin.delete(path)
        assert eventually(lambda: pool.versions().keys() == before, timeout_s=READY_LIMIT_S)
        assert server.admin.get(path)["metadata"]["uid"] != uid


def test_what_the_api_server_refuses_is_told_in_its_words_and_what_runs_stays_as_it_is(
    server: Server, operator: OperatorProcess
) -> None:
    misspelled = {"spec": {"containers": [{"name": "engine", "imag": "x"}]}}
    with server.pool() as pool:
        pool.merge({"rollout": {"maxSurge": 0, "maxUnavailable": 1}})
        pool.wait_ready()
        before = children(pool)
        routers = {"resources": {"limits": {"memory": "1Gi"}}}
        pool.merge({"roles": {"prefill": {"podOverrides": misspelled}}, "router": routers})
        assert eventually(lambda: is_refused(pool), timeout_s=READY_LIMIT_S)
        assert 'unknown field "spec.template.spec.containers[0].imag"' in pool.condition("Accepted")["message"]
        assert children(pool) == before


def children(pool: Pool) -> dict[str, str]:
    """The version of each, when nothing is written any more."""
    return {
        path: version
        for path, version in pool.wait_still(quiet_s=STILL_S).items()
        if not path.startswith("pdclusters/")
    }


CRD: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pdclusters.pdcluster.dev"
RAILS: Final = {"type": "integer", "default": 4}


@contextmanager
def newer_crd(server: Server) -> Iterator[None]:
    """Somebody upgraded the CRD: each PDCluster has a field more, which its default fills."""
    ours = server.admin.get(CRD)["spec"]["versions"]
    newer = copy.deepcopy(ours)
    newer[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["transfer"]["properties"]["rails"] = RAILS
    for versions in (newer, ours):
        body = {"spec": {"versions": versions}}
        answer = server.admin.ask("PATCH", CRD, body, content_type=MERGE_PATCH)
        assert not answer.complaints, answer
        if versions is newer:
            yield


def says(pool: Pool, reason: str, field: str) -> bool:
    told = pool.condition("Accepted")
    return (told.get("status"), told.get("reason")) == ("True", reason) and field in told["message"]


@pytest.mark.costly
def test_a_newer_crd_takes_no_pool_from_an_older_operator(server: Server) -> None:
    with server.pool() as pool, server.operator():
        pool.wait_ready()
        [name] = pool.engines("decode")
        with newer_crd(server):
            assert eventually(lambda: pool.read()["spec"]["transfer"].get("rails") == 4, timeout_s=READY_LIMIT_S)
            pool.merge({"roles": {"decode": {"replicas": 2}}})
            pool.wait_ready()
            assert pool.engines("decode") == {name: 2}
            # The watch that was open when the CRD changed shows the old fields alone, until the server ends it.
            is_told = partial(says, pool, "UnknownFields", "spec.transfer.rails")
            assert eventually(is_told, timeout_s=READY_LIMIT_S), pool.condition("Accepted")
            assert pool.is_ready()
            assert len([event for event in pool.events() if event.startswith("Warning UnknownFields")]) == 1


@contextmanager
def deeper_python() -> Iterator[None]:
    """Lets this process read and write what the operator's Python cannot."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(8 * DEEP)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


DEEP: Final = 1600
"""Levels. Python 3.11 and 3.12 read fewer than 1,500; each level more costs the API server's merge."""


@pytest.mark.costly
def test_an_object_that_is_nested_too_deep_for_python_is_told_and_stops_nobody_else(server: Server) -> None:
    """Whoever may write one pool could end the operator for all."""
    nested: Object = {}
    for _ in range(DEEP):
        nested = {"a": nested}
    with deeper_python(), server.operator() as watching, server.pool() as before:
        before.wait_ready()
        with server.pool({"spec.roles.decode.podOverrides": nested}) as deep:
            assert eventually(lambda: any("nested deeper than 64 levels" in told for told in deep.events()))
            with server.operator("b") as listing, server.pool() as after:
                listing.wait_ready()
                after.wait_ready()
                listing.check()
        watching.check()


SEVERAL_NODES: Final[Object] = {"roles": {"decode": {"parallelism": {"tensor": 2}, "nodesPerInstance": 2}}}


@pytest.mark.slow
def test_an_instance_over_several_nodes_waits_for_leaderworkerset_and_what_runs_goes_on(server: Server) -> None:
    with server.pool() as pool:
        with server.operator(more=("--resync=10",)) as operator:
            pool.wait_ready()
            before = pool.wait_still().keys()
            pool.merge(SEVERAL_NODES)
            assert eventually(lambda: is_refused(pool), timeout_s=READY_LIMIT_S)
            told = pool.condition("Accepted")["message"]
            assert "nodesPerInstance 2" in told
            assert "LeaderWorkerSet" in told
            assert pool.wait_still().keys() == before
            install_groups(server.admin)
            assert eventually(operator.has_ended, timeout_s=READY_LIMIT_S)
            assert "LeaderWorkerSet is installed now: starting anew" in operator.log()
        groups = PlayedGroups(server.admin)
        try:
            with server.operator():  # as the kubelet starts it again
                pool.wait_ready()
                check_group(server, pool)
        finally:
            groups.close()


def check_group(server: Server, pool: Pool) -> None:
    """One set of one group, of which the server kept every field that was applied; its engines' Deployment is gone."""
    [found] = server.admin.get(f"{SETS}/namespaces/{pool.namespace}/leaderworkersets")["items"]
    spec = found["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"], spec["startupPolicy"]) == (1, 2, "LeaderCreated")
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["leaderWorkerTemplate"]["leaderTemplate"] != spec["leaderWorkerTemplate"]["workerTemplate"]
    assert eventually(lambda: pool.engines("decode") == {}, timeout_s=READY_LIMIT_S)
