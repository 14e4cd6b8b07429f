"""Whole replicas on an API server that fails as real ones do: watches, election, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from fakes.api_server import ApiServer, Broken, Fault
from fakes.operator_rig import AT, KEY, Replica, pool, running_operator, running_router, settle
from integration.ports import fresh_port
from patience import PATIENCE_S
from pdcluster_operator.kinds import WATCHED_CHILDREN
from pdcluster_operator.work_queue import WorkQueue

pytestmark = pytest.mark.anyio

LEASE = ("leases", "system", "pdcluster-operator")


async def until(is_true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running_api() -> AsyncIterator[ApiServer]:
    """With a controller that brings pods about."""
    api = ApiServer()
    await api.start()
    controller = asyncio.create_task(_control(api))
    try:
        yield api
    finally:
        controller.cancel()
        await asyncio.wait({controller})
        await api.stop()


async def _control(api: ApiServer) -> None:
    while True:
        await asyncio.sleep(0.05)
        settle(api.store)
        api.tell()


def create(api: ApiServer, body: dict[str, object]) -> None:
    api.store.create(AT, body)
    api.tell()


def change(api: ApiServer, **spec: object) -> None:
    api.store.merge(AT, {"spec": spec})
    api.tell()


def is_ready(api: ApiServer) -> bool:
    """And for what the spec says now."""
    body = api.store.objects[AT].body
    status = body.get("status") or {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions", ())}
    return conditions.get("Ready") == "True" and status["observedGeneration"] == body["metadata"]["generation"]


async def all_read(replica: Replica) -> None:
    await until(lambda: not replica.operator.readiness())


async def test_routers_may_reach_the_api_server_where_the_operator_was_told_that_it_is() -> None:
    async with running_api() as api, running_router() as router, running_operator(api, api_server_ports=(8443,)):
        create(api, pool(router))
        await until(lambda: is_ready(api))
        policies = {one["metadata"]["name"]: one["spec"] for one in api.store.all_of("networkpolicies")}
        assert policies["pool-router"]["egress"][-1] == {"ports": [{"protocol": "TCP", "port": 8443}]}


async def test_objects_of_before_the_start_are_seen_and_a_deletion_is_too() -> None:
    async with running_api() as api, running_router() as router:
        create(api, pool(router))
        async with running_operator(api) as replica:
            await until(lambda: is_ready(api))
            api.store.delete(AT)
            api.tell()
            await until(lambda: not replica.operator.caches.keys())


async def test_a_watch_of_each_kind_stands_in_each_of_many_namespaces() -> None:
    """Each watch keeps a connection. Sessions of aiohttp have a limit, and a watch beyond it waits without a word."""
    namespaces = ("default", *(f"team-{number}" for number in range(16)))
    async with running_api() as api, running_operator(api, namespaces=namespaces):
        await until(lambda: api.num_watches == len(namespaces) * (len(WATCHED_CHILDREN) + 2))


async def test_a_replica_that_cannot_read_everything_leaves_the_lease_to_others() -> None:
    """Otherwise it would hold the Lease and do nothing, for kopf tells of no object before it has listed all kinds."""
    async with running_api() as api:
        api.faults.append(Fault(lambda asked: asked.kind == "list" and asked.path.endswith("/pods"), 403, times=10**6))
        async with running_operator(api):
            await until(lambda: sum(asked.path.endswith("/pods") for asked in api.asked) > 3)
            assert LEASE not in api.store.objects
            api.faults.clear()
            await until(lambda: LEASE in api.store.objects)


async def test_a_namespace_that_is_gone_for_good_keeps_no_other_from_being_looked_after() -> None:
    """Its Role went with it. A process that starts then leaves it out, and ends once the namespace is back."""
    async with running_api() as api, running_router() as router:
        create(api, pool(router))
        api.faults.append(Fault(lambda asked: "/namespaces/gone/" in asked.path, 403, times=10**6))
        async with running_operator(api, namespaces=("gone", "default"), resync_s=10) as replica:
            await until(lambda: is_ready(api))
            assert replica.operator.readiness() == []
            assert b"pdcluster_operator_namespaces_left_out 1.0" in replica.operator._metrics.page()
            assert not any("/namespaces/gone/" in asked.path and asked.kind == "watch" for asked in api.asked)
            api.faults.clear()
            with pytest.raises(ExceptionGroup) as ended:
                await asyncio.wait_for(asyncio.shield(replica.task), PATIENCE_S)
            assert "gone can be read now" in str(ended.value.exceptions)


async def test_a_namespace_that_is_refused_once_is_watched() -> None:
    """An API server that is upgraded may refuse what it grants a moment later."""
    async with running_api() as api, running_router() as router:
        create(api, pool(router))
        api.faults.append(Fault(lambda asked: "/namespaces/default/" in asked.path, 403))
        async with running_operator(api, namespaces=("other", "default")) as replica:
            await until(lambda: is_ready(api))
            assert b"pdcluster_operator_namespaces_left_out 0.0" in replica.operator._metrics.page()


async def test_a_token_that_is_no_good_leaves_no_namespace_out() -> None:
    async with running_api() as api:
        api.faults.append(Fault(lambda asked: "/namespaces/one/" in asked.path, 401, times=3))
        async with running_operator(api, namespaces=("one", "two")) as replica:
            await until(lambda: LEASE in api.store.objects)
            assert b"pdcluster_operator_namespaces_left_out 0.0" in replica.operator._metrics.page()


async def test_where_no_namespace_can_be_read_it_waits_and_tells_why() -> None:
    async with running_api() as api:
        api.faults.append(Fault(lambda asked: "/namespaces/" in asked.path, 403, times=10**6))
        async with running_operator(api, namespaces=("one", "two")) as replica:
            await until(lambda: "/namespaces/one/" in str(replica.operator.readiness()))
            await until(lambda: sum("/namespaces/two/" in asked.path for asked in api.asked) > 2)
            assert LEASE not in api.store.objects
            api.faults.clear()
            await until(lambda: LEASE in api.store.objects)


async def test_what_keeps_the_caches_incomplete_is_told_at_readyz() -> None:
    async with running_api() as api:
        api.faults.append(Fault(lambda asked: asked.kind == "list" and asked.path.endswith("/pods"), 403, times=10**6))
        async with running_operator(api) as replica:
            await until(lambda: "/pods: 403" in str(replica.operator.readiness()))


async def test_a_deletion_that_a_watch_missed_is_found_out() -> None:
    """kopf lists anew after a gap and says nothing of what is gone; what is still there tells that there was a gap."""
    async with running_api() as api, running_router() as router:
        create(api, pool(router))
        async with running_operator(api) as replica:
            await until(lambda: is_ready(api))
            await all_read(replica)
            await api.stop()
            api.store.delete(AT)
            api.forget_history()
            await api.start()
            await until(lambda: not replica.operator.caches.keys())


async def test_a_server_that_was_away_for_a_while_is_watched_again() -> None:
    async with running_api() as api, running_router() as router:
        create(api, pool(router))
        async with running_operator(api):
            await until(lambda: is_ready(api))
            await api.stop()
            await asyncio.sleep(0.5)
            await api.start()
            change(api, router={"replicas": 3, "service": {"port": router.port}})
            await until(lambda: is_ready(api))
            assert api.store.read(("deployments", "default", "pool-router"))["spec"]["replicas"] == 3


async def test_a_cut_watch_goes_on() -> None:
    async with running_api() as api, running_router() as router:
        create(api, pool(router))
        async with running_operator(api) as replica:
            await until(lambda: is_ready(api))
            await all_read(replica)
            assert api.num_watches, "else nothing is cut"
            api.cut_watches()
            change(api, router={"replicas": 3, "service": {"port": router.port}})
            await until(lambda: api.store.read(("deployments", "default", "pool-router"))["spec"]["replicas"] == 3)


async def test_a_watch_that_falls_silent_begins_anew() -> None:
    """Its connection stands: nothing but time tells that nobody is there."""
    async with running_api() as api, running_router() as router:
        silent = Fault(lambda asked: "watch" in asked.query and asked.path.endswith("/pdclusters"), Broken.HANG)
        api.faults.append(silent)
        async with running_operator(api, watch_silence_s=2) as replica:
            await all_read(replica)
            await until(lambda: silent.times == 0)
            create(api, pool(router))
            await until(lambda: is_ready(api))


async def test_a_storm_of_errors_passes() -> None:
    async with running_api() as api, running_router() as router:
        codes = [429, 500, 409, 503]
        api.faults += [Fault(lambda asked: asked.is_write and "leases" not in asked.path, code, 2) for code in codes]
        create(api, pool(router))
        async with running_operator(api):
            await until(lambda: is_ready(api), PATIENCE_S)
            assert [fault.times for fault in api.faults] == [0] * len(codes), "the whole storm came"


async def test_an_operator_that_is_stopped_gives_the_lease_back_and_the_next_one_need_not_wait() -> None:
    async with running_api() as api, running_operator(api, "a", lease_duration_s=60, lease_renew_s=40) as first:
        await until(lambda: first.operator.leader.is_leading)
        async with running_operator(api, "b", lease_duration_s=60, lease_renew_s=40) as second:
            await all_read(second)
            await first.stop()
            assert api.store.read(LEASE)["spec"]["holderIdentity"] in ("", "b")
            await until(lambda: second.operator.leader.is_leading, PATIENCE_S)


async def test_a_leader_that_cannot_renew_writes_no_more() -> None:
    async with running_api() as api, running_router() as router, running_operator(api) as replica:
        await until(lambda: replica.operator.leader.is_leading)
        api.faults.append(Fault(lambda asked: "leases" in asked.path, Broken.HANG, times=999))
        await until(lambda: not replica.operator.leader.is_leading)
        api.asked.clear()
        create(api, pool(router))
        await asyncio.sleep(0.5)
        assert api.writes == []
        api.faults.clear()
        await until(lambda: is_ready(api))


async def test_without_crds_it_waits_for_them_and_is_not_ready() -> None:
    async with running_api() as api:
        crds = {kind for kind in api.served if kind.group == "pdcluster.dev"}
        api.served -= crds
        async with running_operator(api) as replica:
            await until(lambda: bool(api.asked))
            await asyncio.sleep(0.1)
            assert "were not found" in replica.operator.readiness()[0]
            await replica.stop()


async def _page(port: int, path: str) -> tuple[int, str]:
    """Of an operator: status and text."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/{path}") as response:
        return response.status, await response.text()


async def test_it_is_not_ready_before_its_caches_were_compared_with_what_is_there() -> None:
    comparison = Fault(lambda asked: asked.kind == "list" and "limit" in asked.query, 503, times=10**6)
    port = fresh_port()
    async with running_api() as api:
        api.faults.append(comparison)
        async with running_operator(api, port=port):
            await until(lambda: comparison.times < 10**6)
            assert await _page(port, "readyz") == (503, "the caches have not yet shown everything that there is\n")


async def test_a_standby_tells_nothing_of_pdclusters_that_the_leader_tells_of() -> None:
    lasting = {"lease_duration_s": 60, "lease_renew_s": 40}  # No stall makes the standby lead.
    ports = {name: fresh_port() for name in "ab"}
    own = "pdcluster_operator_condition{"
    async with running_api() as api, running_router() as router, running_operator(api, "a", port=ports["a"], **lasting):
        create(api, pool(router))
        await until(lambda: is_ready(api))
        async with running_operator(api, "b", port=ports["b"], **lasting) as standby:
            await until(lambda: standby.operator.caches.keys() == [KEY])
            assert own in (await _page(ports["a"], "metrics"))[1]
            assert own not in (await _page(ports["b"], "metrics"))[1]


async def test_only_what_a_restart_mends_fails_the_liveness_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_api() as api, running_router() as router, running_operator(api) as replica:
        create(api, pool(router))
        await until(lambda: is_ready(api))
        operator = replica.operator
        assert operator.health() == []
        assert operator.auditor is not None
        operator.auditor.blind_to = frozenset({"uid"})
        assert operator.health() == ["1 objects are there that no watch has told of"]
        operator.auditor.blind_to = frozenset()
        monkeypatch.setattr(WorkQueue, "overdue_s", lambda _: 301.0)
        assert operator.health() == ["a PDCluster has been due for 301 s, the limit is 300 s"]
        api.faults.append(Fault(lambda asked: "leases" in asked.path, 0, times=999))
        await until(lambda: operator.health() == [])  # A standby has nothing to do.
