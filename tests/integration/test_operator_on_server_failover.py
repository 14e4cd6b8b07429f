"""Two operators, and the one that leads dies in the middle of a rollout: the other one ends it, within its bounds.

Every state of the pods is judged, by a watch. The leader dies by SIGKILL, or is stopped and goes on later, as a process
whose machine was suspended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from chart_cases.rendering import NAMESPACE
from control_plane.kube_http import MERGE_PATCH
from integration.harness import eventually
from operator_cases.objects import both
from operator_on_server.history import Moment, PodHistory
from operator_on_server.process import OperatorProcess
from operator_on_server.proxy import FaultyProxy
from operator_on_server.server import READY_LIMIT_S, Pool, Server, running_server
from pdcluster_protocol import labels

pytestmark = pytest.mark.control_plane

WANTED: Final = 3
NEW: Final = "engine:2"
LEASE: Final = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/pdcluster-operator"
LONG_LEASE: Final = ("--lease-duration=60", "--lease-renew=40")
"""A machine that stands still ends no term."""
SEED: Final = 20_261_123
START_S: Final = 0.5
"""Of an engine: so a rollout takes some seconds, and there is a middle to die in."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("failover")) as found:
        found.node.stop_s = 0.3
        yield found


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultyProxy]:
    found = FaultyProxy(server.plane, SEED)
    yield found
    found.close()


@contextmanager
def ready_pool(server: Server, surge: int, unavailable: int) -> Iterator[Pool]:
    rollout = {"maxSurge": surge, "maxUnavailable": unavailable}
    server.node.start_s = 0.0
    with server.pool({**both("replicas", WANTED), "spec.rollout": rollout}) as pool:
        pool.wait_ready()
        server.node.start_s = START_S
        try:
            yield pool
        finally:
            go_on(server)


def is_in_the_middle(pool: Pool) -> bool:
    """Old and new engines of both roles are asked for."""
    return all(sum(number > 0 for number in pool.engines(role).values()) == 2 for role in ("prefill", "decode"))


def holder(server: Server) -> str:
    return str(server.admin.get(LEASE)["spec"]["holderIdentity"])


def start_rollout(server: Server, pool: Pool) -> None:
    """A new image: a new revision of both roles. It stays under way until ``go_on``: this process may have no
    core for as long as the whole rollout takes."""
    server.node.never_ready = lambda pod: bool(pod["spec"]["containers"][0]["image"] == NEW)
    pool.merge({"image": NEW})
    assert eventually(lambda: is_in_the_middle(pool), timeout_s=READY_LIMIT_S)


def go_on(server: Server) -> None:
    server.node.never_ready = lambda pod: False


def check_bounds(moments: list[Moment], surge: int, unavailable: int) -> None:
    assert len({revision for moment in moments for revision in moment.serving}) == 2, "nothing was rolled out"
    for moment in moments:
        for role in ("prefill", "decode"):
            assert moment.num_ready(role) >= WANTED - unavailable, moment
            assert moment.there[role] <= WANTED + surge, moment
        assert moment.serving, moment


@pytest.mark.costly
@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_a_leader_that_is_killed_in_mid_rollout_is_followed_and_the_rollout_ends_within_its_bounds(
    server: Server, surge: int, unavailable: int
) -> None:
    with server.operator("a") as first:
        first.wait_leading()
        with server.operator("b") as second, ready_pool(server, surge, unavailable) as pool:
            second.wait_ready()
            history = PodHistory(server.admin, pool.namespace)
            start_rollout(server, pool)
            assert holder(server) == first.identity
            first.kill()
            assert is_in_the_middle(pool)
            go_on(server)
            pool.wait_ready()
            history.close()
            assert holder(server) == second.identity
            assert eventually(lambda: images(pool) == {NEW}, timeout_s=READY_LIMIT_S), images(pool)
            second.check()
    check_bounds(history.moments, surge, unavailable)


def images(pool: Pool) -> set[str]:
    """Of the engines' workloads. An old one goes when its last pod is gone."""
    found = [one["spec"]["template"] for one in pool.all_of("deployments") if labels.ROLE in one["metadata"]["labels"]]
    return {template["spec"]["containers"][0]["image"] for template in found}


@pytest.mark.costly
def test_a_leader_that_was_stopped_for_long_writes_nothing_when_it_goes_on(server: Server) -> None:
    with server.operator("a") as first:
        first.wait_leading()
        with server.operator("b") as second, ready_pool(server, 1, 0) as pool:
            second.wait_ready()
            history = PodHistory(server.admin, pool.namespace)
            start_rollout(server, pool)
            os.kill(first.pid, signal.SIGSTOP)
            go_on(server)
            try:
                pool.wait_ready()
                assert holder(server) == second.identity
                since = server.mark()
            finally:
                os.kill(first.pid, signal.SIGCONT)
            assert eventually(lambda: "no longer leading" in first.log(), timeout_s=READY_LIMIT_S)
            pool.wait_still(quiet_s=2.0)
            # A call that was under way when it was stopped is refused: it was decided on an old picture. Only an Event
            # has no version by which the API server could refuse it; it tells of what was done before.
            late = [one for one in server.writes(since, by=first) if one.right.resource != "events"]
            assert [one for one in late if one.code < 300] == []
            assert server.writes(0, by=first), "else nothing is shown"
            assert holder(server) == second.identity
            history.close()
            stays_alive(first, second)
    check_bounds(history.moments, 1, 0)


@pytest.mark.costly
def test_a_status_that_arrives_when_another_one_leads_is_refused(server: Server, proxy: FaultyProxy) -> None:
    with server.operator("a", url=proxy.url) as first:
        first.wait_leading()
        with server.operator("b") as second, ready_pool(server, 1, 0) as pool:
            second.wait_ready()
            start_rollout(server, pool)
            proxy.holds_status = True
            go_on(server)
            assert eventually(lambda: proxy.num_held > 0, timeout_s=READY_LIMIT_S)
            first.kill()
            pool.wait_ready()
            pool.wait_still(quiet_s=2.0)
            assert holder(server) == second.identity
            told, since = pool.read()["status"], server.mark()
            proxy.holds_status = False
            assert eventually(lambda: bool(server.writes(since, by=first)), timeout_s=READY_LIMIT_S)
            assert {one.code for one in server.writes(since, by=first)} == {409}
            assert pool.read()["status"] == told
            second.check()


def stays_alive(*operators: OperatorProcess) -> None:
    for one in operators:
        one.check_alive()


def test_the_standby_is_ready_and_asks_for_no_change_while_another_one_leads(server: Server) -> None:
    server.admin.ask("DELETE", LEASE)  # Of the test before, whose leader was killed.
    with server.operator("a", more=LONG_LEASE) as first:
        first.wait_leading()
        with server.operator("b", more=LONG_LEASE) as standby, server.pool() as pool:
            standby.wait_ready()
            pool.wait_ready()
            pool.merge({"roles": {"decode": {"replicas": 2}}})
            pool.wait_ready()
            assert server.writes(0, by=standby) == []
            assert server.writes(0, by=first), "else nothing is shown"
            assert holder(server) == first.identity
            stays_alive(first, standby)
    server.admin.delete(LEASE)  # Nobody need wait for it.


@pytest.mark.slow
def test_engines_that_an_operator_stopped_before_it_died_leave_no_proof_to_those_that_come(server: Server) -> None:
    """Its moves were done, its status was never written, and by now the user wants the engines again."""
    with server.pool() as pool:
        with server.operator("a") as first:
            pool.wait_ready()
            first.kill()
        gone, num_orders = pods_of(pool), len(server.routers.orders)
        stop_engines(pool)
        assert pool.condition("TransferVerified")["status"] == "True", "else there is nothing to fall"
        with server.operator("b") as second:
            assert eventually(lambda: len(server.routers.orders) > num_orders, timeout_s=READY_LIMIT_S)
            pool.wait_ready()
            second.check()
        [order] = server.routers.orders[num_orders:]
        assert not gone & {*(order.prefill_pods or ()), *(order.decode_pods or ())}


def pods_of(pool: Pool) -> set[str]:
    return {one["metadata"]["name"] for one in pool.all_of("pods") if labels.ROLE in one["metadata"]["labels"]}


def stop_engines(pool: Pool) -> None:
    """As an operator does for 0 replicas of both roles."""
    for role in ("prefill", "decode"):
        [name] = pool.engines(role)
        path = f"{pool.list_path('deployments')}/{name}"
        answer = pool.admin.ask("PATCH", path, {"spec": {"replicas": 0}}, content_type=MERGE_PATCH)
        assert not answer.complaints, answer
    assert eventually(lambda: not pods_of(pool), timeout_s=READY_LIMIT_S)
