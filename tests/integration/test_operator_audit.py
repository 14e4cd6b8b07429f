"""The caches beside the API server, and what the probes make of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from fakes.api_server import ApiServer, Fault
from fakes.router import until
from operator_cases.objects import pdcluster
from pdcluster_operator.access import KubeAccess, open_session
from pdcluster_operator.audit import Auditor
from pdcluster_operator.caches import Caches, Key
from pdcluster_operator.core.views import view_of
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import PDCLUSTER
from pdcluster_operator.probes import serve_probes

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def auditing() -> AsyncIterator[tuple[ApiServer, Caches, Auditor, list[Key]]]:
    api, caches, news = ApiServer(), Caches(), list[Key]()
    await api.start()
    async with open_session(KubeAccess(api.url)) as session:
        kube = HttpKube(session, api.url, timeout_s=5.0, fence=None)
        yield api, caches, Auditor(kube, caches, [PDCLUSTER], ["a", "b"], interval_s=60, on_news=news.append), news
    await api.stop()


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


async def test_a_watch_that_began_anew_is_reason_enough_to_look_for_what_is_gone() -> None:
    async with auditing() as (api, caches, auditor, news):
        make(api, caches, "a", "goes")
        running = asyncio.create_task(auditor.run())
        await until(lambda: auditor.is_complete)
        api.store.delete(("pdclusters", "a", "goes"))
        auditor.suspect()
        await until(lambda: news == [Key("a", "goes")], 5.0)
        running.cancel()
        await asyncio.wait({running})


async def test_a_list_that_fails_then_is_tried_again() -> None:
    async with auditing() as (api, caches, auditor, news):
        make(api, caches, "a", "goes")
        running = asyncio.create_task(auditor.run())
        await until(lambda: auditor.is_complete)
        api.store.delete(("pdclusters", "a", "goes"))
        api.faults.append(Fault(lambda asked: not asked.is_write, 403))
        auditor.suspect()
        await until(lambda: news == [Key("a", "goes")], 8.0)
        assert api.faults[0].times == 0
        running.cancel()
        await asyncio.wait({running})


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
