"""What a user reads when pods do not come up, on a real API server: the cause, at the right condition.

A played kubelet tells of deaths and of a registry's words as a kubelet does; Kubernetes' own controllers do the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_plane.kube_http import Object
from integration.harness import eventually
from operator_on_server.groups import SETS, PlayedGroups, install_groups
from operator_on_server.process import OperatorProcess
from operator_on_server.server import READY_LIMIT_S, Pool, Server, running_server
from pdcluster_protocol import labels

pytestmark = pytest.mark.control_plane

OOM = {"exitCode": 137, "reason": "OOMKilled", "message": "INFO loading\nRuntimeError: no memory\n"}
DENIED = 'failed to pull and unpack image "pdcluster:1": failed to authorize: 401 Unauthorized'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("deaths")) as found:
        install_groups(found.admin)
        groups = PlayedGroups(found.admin)
        try:
            yield found
        finally:
            groups.close()


@pytest.fixture
def operator(server: Server) -> Iterator[OperatorProcess]:
    with server.operator() as process:
        process.wait_leading()
        yield process
        process.check()
    server.node.death_of = server.node.waits_for = lambda pod: None


def is_of(pod: Object, component: str) -> bool:
    return bool(pod["metadata"]["labels"].get(labels.COMPONENT) == component)


def is_told(pool: Pool, condition: str, reason: str, *words: str) -> bool:
    found = pool.condition(condition)
    return found.get("reason") == reason and all(word in found["message"] for word in words)


@pytest.mark.costly
def test_an_engine_that_dies_three_times_is_told_at_its_own_role_with_its_cause_and_its_last_words(
    server: Server, operator: OperatorProcess
) -> None:
    server.node.death_of = lambda pod: OOM if is_of(pod, "decode") else None
    with server.pool() as pool:
        words = ("container engine died", "OOMKilled (exit code 137)", "RuntimeError: no memory")
        assert eventually(lambda: is_told(pool, "Degraded", "CrashLoop", *words), timeout_s=READY_LIMIT_S), pool.read()
        assert is_told(pool, "Progressing", "CrashLoop", *words)
        assert is_told(pool, "DecodeReady", "InstancesNotReady", *words)
        assert "died" not in pool.condition("PrefillReady")["message"]
        server.node.death_of = lambda pod: None
        pool.wait_ready()
        assert is_told(pool, "Degraded", "AsWanted")


def test_a_router_whose_image_is_refused_is_told_with_the_registrys_words(
    server: Server, operator: OperatorProcess
) -> None:
    refused = {"reason": "ErrImagePull", "message": DENIED}
    server.node.waits_for = lambda pod: refused if is_of(pod, "router") else None
    with server.pool() as pool:
        words = (f"container router: ImagePullBackOff: {DENIED}",)
        assert eventually(lambda: is_told(pool, "RouterReady", "RoutersNotReady", *words), timeout_s=READY_LIMIT_S)
        assert "401" not in pool.condition("DecodeReady")["message"]


@pytest.mark.slow
def test_an_engine_over_several_nodes_that_is_made_anew_after_each_death_is_a_crash_loop_too(
    server: Server, operator: OperatorProcess
) -> None:
    """No container of it is ever seen waiting in CrashLoopBackOff."""
    server.node.death_of = lambda pod: OOM if is_of(pod, "decode") else None
    several = {"spec.roles.decode.parallelism": {"tensor": 2}, "spec.roles.decode.nodesPerInstance": 2}
    with server.pool(several) as pool:
        words = ("OOMKilled (exit code 137)", "RuntimeError: no memory")
        assert eventually(lambda: is_told(pool, "Degraded", "CrashLoop", *words), timeout_s=READY_LIMIT_S), pool.read()


@pytest.mark.costly
def test_a_rollout_that_the_order_of_groups_holds_up_keeps_the_ready_one_and_tells_the_cure(
    server: Server, operator: OperatorProcess
) -> None:
    """The set would give up its last group, which is ready, while the first one is not."""
    changes = {
        "spec.roles.decode.replicas": 2, "spec.roles.decode.parallelism": {"tensor": 2},
        "spec.roles.decode.nodesPerInstance": 2, "spec.rollout": {"maxSurge": 1, "maxUnavailable": 0},
    }  # fmt: skip
    with server.pool(changes) as pool:
        pool.wait_ready()
        [old] = groups_of(server, pool)
        server.node.waits_for = lambda pod: {"reason": "Lost"} if pod["metadata"]["name"] == f"{old}-0" else None
        assert eventually(lambda: is_told(pool, "DecodeReady", "InstancesNotReady")), pool.read()
        pool.merge({"image": "engine:2"})
        words = (f"group 0 of {old} is not ready", "set rollout.maxUnavailable to 1")
        assert eventually(lambda: is_told(pool, "Progressing", "HeldByGroups", *words)), pool.read()
        assert groups_of(server, pool)[old] == 2
        pool.merge({"rollout": {"maxUnavailable": 1}})
        pool.wait_ready()
        assert old not in groups_of(server, pool)


def groups_of(server: Server, pool: Pool) -> dict[str, int]:
    """Each LeaderWorkerSet and the groups that it is asked for."""
    found = server.admin.get(f"{SETS}/namespaces/{pool.namespace}/leaderworkersets")["items"]
    return {one["metadata"]["name"]: one["spec"]["replicas"] for one in found}


def test_a_pool_is_counted_by_its_conditions_by_the_leader_alone_and_for_as_long_as_it_is_there(
    server: Server, operator: OperatorProcess
) -> None:
    with server.pool() as pool, server.operator("b") as standby:
        standby.wait_ready()
        own = f'name="{pool.name}",namespace="{pool.namespace}"'
        operator.wait_until("metrics", f'pdcluster_operator_condition{{condition="Ready",{own},status="True"}} 1')
        assert own not in standby.page("metrics")
        server.admin.delete(pool.path)
        assert eventually(lambda: own not in operator.page("metrics"), timeout_s=READY_LIMIT_S)
