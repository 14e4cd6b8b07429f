"""The API server goes away, forgets its history, or answers with errors, while a pool changes: the operator comes to
rest with what the spec says, and its process lives through all of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest

from control_plane.kube_http import Object
from integration.harness import eventually
from operator_cases.objects import both
from operator_on_server.history import PodHistory
from operator_on_server.process import OperatorProcess
from operator_on_server.proxy import OF_WATCHES, OF_WRITES, FaultyProxy
from operator_on_server.server import READY_LIMIT_S, Pool, Server, running_server

pytestmark = [pytest.mark.control_plane, pytest.mark.slow]

SEED: Final = 20_261_121
RATE: Final = 0.3
"""Nearly every look at a PDCluster, of twenty calls, is hit; one that asks less goes through."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("storms")) as found:
        yield found


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultyProxy]:
    found = FaultyProxy(server.plane, SEED)
    yield found
    found.close()


@contextmanager
def behind(server: Server, proxy: FaultyProxy) -> Iterator[OperatorProcess]:
    """The operator asks through the proxy. It lives to the end, and has not been started anew."""
    with server.operator(url=proxy.url) as process:
        yield process
        process.check_alive()


def changed(replicas: int) -> Object:
    """A new revision, and another number of engines."""
    return {"image": "engine:2", "roles": {role: {"replicas": replicas} for role in ("prefill", "decode")}}


def check_at_rest(pool: Pool, replicas: int) -> None:
    """Ready, with what the spec says, once, and nothing else. An old workload without engines goes after a call that
    failed: when it is made again."""
    pool.wait_ready()
    asked = partial(replicas_asked, pool)
    assert eventually(lambda: asked() == ([replicas], [replicas]), timeout_s=READY_LIMIT_S), asked()
    there = pool.wait_still()
    kinds = [name.partition("/")[0] for name in there]
    assert [kinds.count(kind) for kind in ("deployments", "services", "secrets", "pods")] == [3, 4, 1, 2 * replicas + 1]


def replicas_asked(pool: Pool) -> tuple[list[int], ...]:
    """Of each workload, by role."""
    return tuple(list(pool.engines(role).values()) for role in ("prefill", "decode"))


def has_seen_all(proxy: FaultyProxy) -> bool:
    """Every kind of fault has come, and 50 in all. A watch that stands is cut: only one that begins can be refused."""
    proxy.cut()
    return set(proxy.num_injected) == {*OF_WRITES, *OF_WATCHES} and sum(proxy.num_injected.values()) >= 50


def names_of(pool: Pool) -> set[str]:
    """Of the operator's own children; controllers draw theirs at random."""
    drawn = re.compile("(pods|replicasets|endpointslices)/")
    return {name for name in pool.versions() if not drawn.match(name)}


def test_a_storm_of_refusals_and_lost_answers_passes_and_leaves_what_was_asked_for(
    server: Server, proxy: FaultyProxy
) -> None:
    proxy.rate = RATE
    with behind(server, proxy), server.pool() as pool:
        assert eventually(lambda: bool(pool.all_of("deployments")), timeout_s=READY_LIMIT_S), "not a step in the storm"
        pool.merge(changed(replicas=2))
        assert eventually(lambda: has_seen_all(proxy), timeout_s=READY_LIMIT_S, poll_s=1.0), proxy.num_injected
        proxy.rate = 0.0
        check_at_rest(pool, replicas=2)
        with server.pool({"spec.image": "engine:2", **both("replicas", 2)}) as calm:
            calm.wait_ready()
            assert names_of(pool) == names_of(calm)
    assert server.routers.refusals == []


def test_a_rollout_in_a_storm_keeps_its_bounds(server: Server, proxy: FaultyProxy) -> None:
    with behind(server, proxy), server.pool(both("replicas", 2)) as pool:
        pool.wait_ready()
        history = PodHistory(server.admin, pool.namespace)
        proxy.rate = RATE
        pool.merge({"image": "engine:2"})
        assert eventually(lambda: len(pool.engines("decode")) == 2, timeout_s=READY_LIMIT_S), "not a step in the storm"
        assert eventually(lambda: sum(proxy.num_injected.values()) >= 50, timeout_s=READY_LIMIT_S)
        proxy.rate = 0.0
        check_at_rest(pool, replicas=2)
        history.close()
    assert len({revision for moment in history.moments for revision in moment.serving}) == 2
    for moment in history.moments:
        for role in ("prefill", "decode"):
            assert moment.num_ready(role) >= 2, moment
            assert moment.there[role] <= 3, moment
        assert moment.serving, moment


def is_cut_enough(proxy: FaultyProxy, num_times: int) -> bool:
    """Again and again, and not only the air: an operator that stands still has not come back."""
    proxy.cut()
    return num_times >= 10 and proxy.num_cut >= 20


def test_connections_that_are_cut_again_and_again_stop_no_rollout(server: Server, proxy: FaultyProxy) -> None:
    with behind(server, proxy), server.pool() as pool:
        pool.wait_ready()
        pool.merge(changed(replicas=2))
        times = itertools.count(1)
        assert eventually(lambda: is_cut_enough(proxy, next(times)), timeout_s=READY_LIMIT_S, poll_s=0.3)
        check_at_rest(pool, replicas=2)


def test_what_happened_while_nobody_got_through_is_found_when_history_is_gone(
    server: Server, proxy: FaultyProxy
) -> None:
    with behind(server, proxy) as operator, server.pool() as pool, server.pool() as doomed:
        pool.wait_ready()
        doomed.wait_ready()
        proxy.is_down = True
        proxy.cut()
        pool.merge(changed(replicas=2))
        server.admin.delete(doomed.path)
        assert eventually(lambda: not doomed.versions(), timeout_s=READY_LIMIT_S, poll_s=0.2)
        with server.pool(namespace=doomed.namespace) as again:
            for name in ("pool-router", *pool.engines("prefill")):  # what an operator that is away cannot put back
                server.admin.delete(f"{pool.list_path('deployments')}/{name}")
            server.plane.compact()
            server.plane.restart_api_server()
            assert "status" not in again.read()
            proxy.is_down = False
            check_at_rest(pool, replicas=2)
            check_at_rest(again, replicas=1)
        assert "watch missed a deletion object=Deployment" in operator.log(), "history was there: nothing was missed"


def test_a_restarted_api_server_finds_the_rollout_going_on(server: Server) -> None:
    with server.operator() as operator, server.pool() as pool:
        pool.wait_ready()
        pool.merge(changed(replicas=2))
        assert eventually(lambda: len(pool.engines("decode")) == 2, timeout_s=READY_LIMIT_S)
        server.plane.restart_api_server()
        check_at_rest(pool, replicas=2)
        operator.check_alive()


def test_an_operator_that_starts_while_nobody_gets_through_waits(server: Server, proxy: FaultyProxy) -> None:
    proxy.is_down = True
    with server.pool() as pool, behind(server, proxy) as operator:
        assert eventually(lambda: "API server not asked" in operator.log(), timeout_s=READY_LIMIT_S)
        proxy.is_down = False
        pool.wait_ready()


def test_a_watch_that_breaks_ends_the_process_with_a_word_and_its_next_life_goes_on(
    server: Server, proxy: FaultyProxy
) -> None:
    """kopf takes every error within a stream but 410 for fatal; Kubernetes starts the container anew."""
    with server.pool() as pool:
        with server.operator(url=proxy.url) as operator:
            pool.wait_ready()
            proxy.breaks_watches = True
            proxy.cut()
            assert eventually(operator.has_ended, timeout_s=READY_LIMIT_S)
            assert "operator ended" in operator.log()
            assert "a fault of the test" in operator.log()
        proxy.breaks_watches = False
        pool.merge(changed(replicas=2))
        with behind(server, proxy):
            check_at_rest(pool, replicas=2)
