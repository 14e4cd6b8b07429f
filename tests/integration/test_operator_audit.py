"""The caches beside the API server, and what the probes make of that."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from fakes.api_server import ApiServer, Asked, Broken, Fault
from fakes.router import until
from operator_cases.objects import pdcluster
from pdcluster_kube.access import KubeAccess
from pdcluster_kube.session import open_session
from pdcluster_operator.audit import Auditor
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.seen.object_views import view_of
from pdcluster_operator.errors import Forbidden
from pdcluster_operator.health_server import serve_probes
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import PDCLUSTER
from pdcluster_protocol.errors import ConfigError

pytestmark = pytest.mark.anyio


class HeldSleep:
    """The auditor's sleep: each notes how long it is to be, and ends when the test lets it."""

    def __init__(self) -> None:
        self.lengths_s: list[float] = []
        self._ended = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.lengths_s.append(seconds)
        await self._ended.acquire()

    def end(self, times: int = 1) -> None:
        """So many of them, those to come too."""
        for _ in range(times):
            self._ended.release()


@asynccontextmanager
async def auditing(
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[tuple[ApiServer, Caches, Auditor, list[Key]]]:
    api, caches, news = ApiServer(), Caches(), list[Key]()
    await api.start()
    async with open_session(KubeAccess(api.url)) as session:
        kube = HttpKube(session, api.url, timeout_s=60.0, fence=None)
        where = [PDCLUSTER], ["a", "b"]
        yield api, caches, Auditor(kube, caches, *where, interval_s=60, on_news=news.append, sleep=sleep), news
    await api.stop()


@asynccontextmanager
async def with_a_ghost(
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[tuple[ApiServer, Auditor, list[Key]]]:
    """It runs and its caches are complete. Then something goes, in the namespace that is listed last, and no watch has
    told: so once there is news, a comparison is at its end."""
    async with auditing(sleep) as (api, caches, auditor, news):
        make(api, caches, "b", "goes")
        running = asyncio.create_task(auditor.run())
        await until(lambda: auditor.is_complete)
        api.store.delete(("pdclusters", "b", "goes"))
        api.asked.clear()
        try:
            yield api, auditor, news
        finally:
            running.cancel()
            await asyncio.wait({running})


def make(api: ApiServer, caches: Caches | None, namespace: str, name: str) -> None:
    body = api.store.create(("pdclusters", namespace, name), pdcluster({}))
    if caches:
        caches.put(view_of(body))


async def test_an_empty_cluster_is_complete_at_once() -> None:
    async with auditing() as (_, _, auditor, _):
        await auditor.compare()
        assert auditor.is_complete


async def test_what_is_gone_is_dropped_and_told_and_what_is_there_stays() -> None:
    async with auditing() as (api, caches, auditor, news):
        make(api, caches, "a", "stays")
        make(api, caches, "a", "goes")
        make(api, caches, "b", "goes")
        api.store.delete(("pdclusters", "a", "goes"))
        await auditor.compare()
        assert news == [Key("a", "goes")]
        assert set(caches.keys()) == {Key("a", "stays"), Key("b", "goes")}


@pytest.mark.parametrize("compares", [Auditor.compare, Auditor.drop_gone])
async def test_a_namespace_that_cannot_be_listed_keeps_no_other_from_being_compared(
    compares: Callable[[Auditor], Awaitable[None]],
) -> None:
    async with auditing() as (api, caches, auditor, news):
        make(api, caches, "b", "goes")
        api.store.delete(("pdclusters", "b", "goes"))
        api.faults.append(Fault(lambda asked: "/namespaces/a/" in asked.path, 403, times=99))
        with pytest.raises(Forbidden, match="/namespaces/a/"):
            await compares(auditor)
        assert news == [Key("b", "goes")]
        assert not auditor.is_complete


async def test_a_watch_that_began_anew_is_reason_enough_to_look_for_what_is_gone() -> None:
    async with with_a_ghost() as (_, auditor, news):
        auditor.suspect()
        await until(lambda: news == [Key("b", "goes")], 40.0)  # Before its own time comes.


async def test_a_list_that_fails_then_is_tried_again() -> None:
    async with with_a_ghost() as (api, auditor, news):
        api.faults.append(Fault(lambda asked: "/namespaces/b/" in asked.path, 403))
        auditor.suspect()
        await until(lambda: news == [Key("b", "goes")], 40.0)  # Before its own time comes.
        assert api.faults[0].times == 0


async def test_many_reasons_in_one_moment_make_one_comparison() -> None:
    sleep = HeldSleep()
    async with with_a_ghost(sleep) as (api, auditor, news):
        auditor.suspect()
        await until(lambda: bool(sleep.lengths_s))
        for _ in range(5):
            auditor.suspect()
            await asyncio.sleep(0)
        assert api.asked == []
        sleep.end(times=9)
        await until(lambda: bool(news))
        assert sleep.lengths_s == [1.0], "of those reasons none is left"
        assert len(api.asked) == 2, "one list for each namespace"


async def test_a_reason_that_comes_while_it_compares_is_one_to_compare_again() -> None:
    sleep = HeldSleep()
    async with with_a_ghost(sleep) as (api, auditor, _):

        def begins_anew(_: Asked) -> bool:
            auditor.suspect()
            return False

        auditor.suspect()
        api.faults.append(Fault(begins_anew, Broken.HANG))
        sleep.end()
        await until(lambda: sleep.lengths_s == [1.0, 1.0])


async def test_while_lists_fail_it_waits_twice_as_long_each_time_up_to_a_minute_and_then_begins_anew() -> None:
    sleep = HeldSleep()
    async with with_a_ghost(sleep) as (api, auditor, news):
        api.faults.append(Fault(lambda asked: not asked.is_write, 403, times=7 * 2))  # Two namespaces are listed.
        auditor.suspect()
        sleep.end(times=8)
        await until(lambda: bool(news))
        assert sleep.lengths_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
        auditor.suspect()
        await until(lambda: len(sleep.lengths_s) == 9)
        assert sleep.lengths_s[-1] == 1.0


async def test_looking_for_what_is_gone_says_nothing_of_blindness() -> None:
    async with auditing() as (api, _, auditor, _):
        await auditor.compare()
        make(api, None, "a", "new")
        await auditor.drop_gone()
        await auditor.drop_gone()
        assert auditor.blind_to == frozenset()


async def test_another_namespaces_objects_are_none_of_its_business() -> None:
    async with auditing() as (api, caches, auditor, news):
        make(api, caches, "c", "x")
        api.store.delete(("pdclusters", "c", "x"))
        await auditor.compare()
        assert news == []


async def test_a_watch_that_tells_nothing_is_found_out_at_the_second_time() -> None:
    async with auditing() as (api, caches, auditor, _):
        await auditor.compare()
        make(api, None, "a", "untold")
        await auditor.compare()
        assert not auditor.blind_to  # It may be on its way.
        await auditor.compare()
        assert len(auditor.blind_to) == 1
        caches.put(view_of(api.store.read(("pdclusters", "a", "untold"))))
        await auditor.compare()
        assert not auditor.blind_to


async def test_caches_are_complete_although_something_is_always_new() -> None:
    async with auditing() as (api, caches, auditor, _):
        make(api, None, "a", "one")
        await auditor.compare()
        assert not auditor.is_complete
        await auditor.compare()
        assert not auditor.is_complete  # The same one is still missing.
        caches.put(view_of(api.store.read(("pdclusters", "a", "one"))))
        make(api, None, "a", "two")
        await auditor.compare()
        assert auditor.is_complete


async def test_probes_say_why_they_fail() -> None:
    problems = ["one", "two"]
    probes = serve_probes("127.0.0.1", 0, health=list, readiness=lambda: problems, metrics=lambda: b"m 1\n")
    async with probes as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/healthz") as response:
            assert (response.status, await response.text()) == (200, "ok\n")
        async with session.get("/readyz") as response:
            assert (response.status, await response.text()) == (503, "one\ntwo\n")
        async with session.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_a_port_that_is_taken_is_one_line_with_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        probes = serve_probes("127.0.0.1", port, health=list, readiness=list, metrics=bytes)
        with pytest.raises(ConfigError) as refused:
            await probes.__aenter__()
    assert str(refused.value) == (
        f"cannot listen on port {port} of 127.0.0.1 (Address already in use): choose another --port or --host"
    )
