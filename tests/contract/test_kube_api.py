"""What discovery relies on of an API server's list and watch. One suite: the fake keeps the real one's contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from contract.kube_ends import API_SERVERS, MARKS, KubeApi
from fakes.kube_api import endpoint, slice_of
from pdcluster_kube.reader import ApiStatusError, KubeReader, Lines
from pdcluster_protocol.errors import Unavailable
from pdcluster_router.core.endpoint_slices import SliceCache
from pdcluster_router.engines.discovery import Source

pytestmark = pytest.mark.anyio

LIMIT_S = 10.0


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in sorted(API_SERVERS)])
def opener(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[KubeApi]:
    return API_SERVERS[request.param](request)


@pytest.fixture
async def api(opener: AbstractAsyncContextManager[KubeApi]) -> AsyncIterator[KubeApi]:
    async with opener as opened:
        yield opened


def source_of(api: KubeApi, cluster: str = "c") -> Source:
    return Source(api.namespace, cluster, watch_timeout_s=2)


def client_of(api: KubeApi) -> KubeReader:
    return KubeReader(api.access, timeout_s=LIMIT_S)


async def listed(api: KubeApi) -> SliceCache:
    cache = SliceCache()
    cache.replace(await client_of(api).read(source_of(api).list_path))
    return cache


def urls(cache: SliceCache) -> list[str]:
    return [member.url for member in cache.picture.members]


async def next_event(lines: Lines) -> dict[str, Any]:
    """The next one that is no bookmark."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            line = await lines.next()
            assert line is not None, "the watch has ended"
            event: dict[str, Any] = msgspec.json.decode(line)
            if event["type"] != "BOOKMARK":
                return event


def decode(name: str, host: str, **changes: Any) -> dict[str, Any]:
    return slice_of(name, "decode", endpoint(host), **changes)


async def test_a_list_holds_the_slices_that_fit_the_selector_and_no_others(api: KubeApi) -> None:
    await api.put(decode("a", "10.0.0.1"))
    await api.put(decode("b", "10.0.0.2", cluster="another"))
    await api.put(slice_of("r", "router", endpoint("10.0.0.3")))
    cache = await listed(api)
    assert urls(cache) == ["http://10.0.0.1:8000"]
    assert cache.resource_version


async def test_an_empty_list_has_a_version_to_watch_from(api: KubeApi) -> None:
    cache = await listed(api)
    assert (urls(cache), cache.resource_version.isdecimal()) == ([], True)
    async with client_of(api).stream(source_of(api).watch_path(cache.resource_version), limit_s=LIMIT_S) as lines:
        await api.put(decode("a", "10.0.0.1"))
        assert (await next_event(lines))["type"] == "ADDED"


async def test_a_watch_tells_all_that_came_after_its_version_in_order(api: KubeApi) -> None:
    await api.put(decode("a", "10.0.0.1"))
    cache = await listed(api)
    await api.put(decode("b", "10.0.0.2"))
    await api.delete("a")
    async with client_of(api).stream(source_of(api).watch_path(cache.resource_version), limit_s=LIMIT_S) as lines:
        await api.put(decode("b", "10.0.0.3"))
        events = [await next_event(lines) for _ in range(3)]
    told = [(event["type"], event["object"]["metadata"]["name"]) for event in events]
    assert told == [("ADDED", "b"), ("DELETED", "a"), ("MODIFIED", "b")]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(set(versions))
    assert versions[0] > int(cache.resource_version)
    for event in events:
        assert cache.apply(msgspec.json.encode(event))
    assert urls(cache) == urls(await listed(api)) == ["http://10.0.0.3:8000"]


async def test_a_slice_that_fits_the_selector_no_longer_is_deleted_for_its_watch(api: KubeApi) -> None:
    await api.put(decode("a", "10.0.0.1"))
    cache = await listed(api)
    async with client_of(api).stream(source_of(api).watch_path(cache.resource_version), limit_s=LIMIT_S) as lines:
        await api.put(decode("a", "10.0.0.1", cluster="another"))
        event = await next_event(lines)
    assert event["type"] == "DELETED"
    assert cache.apply(msgspec.json.encode(event))
    assert urls(cache) == []


async def test_a_watch_ends_by_itself_when_its_time_is_over(api: KubeApi) -> None:
    cache = await listed(api)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with client_of(api).stream(source_of(api).watch_path(cache.resource_version), limit_s=LIMIT_S) as lines:
        while (line := await lines.next()) is not None:
            assert not cache.apply(line)
    assert 1.5 < loop.time() - began < LIMIT_S


async def test_a_version_from_before_its_history_is_a_410(api: KubeApi) -> None:
    cache = await listed(api)
    path = source_of(api).watch_path(cache.resource_version)
    await api.put(decode("a", "10.0.0.1"))
    await api.forget_history()

    async def watch() -> None:
        """As an event of a watch that began, or as the status of one that did not."""
        async with client_of(api).stream(path, limit_s=LIMIT_S) as lines:
            cache.apply(await lines.next() or b"")

    with pytest.raises(Unavailable, match="410"):
        await watch()


async def test_conditions_come_back_as_they_were_written(api: KubeApi) -> None:
    conditions: list[dict[str, bool | None]] = [{}, {"ready": False, "serving": True, "terminating": True}]
    endpoints = [endpoint(f"10.0.0.{index}", "", **given) for index, given in enumerate(conditions, 1)]
    await api.put(slice_of("a", "decode", *endpoints))
    members = (await listed(api)).picture.members
    assert [member.state.value for member in members] == ["serving", "finishing"]


async def test_what_an_api_server_does_not_serve_is_refused_with_a_status(api: KubeApi) -> None:
    with pytest.raises(ApiStatusError) as refused:
        await client_of(api).read("/apis/discovery.k8s.io/v0/nothing")
    assert refused.value.status in (403, 404)
