"""The discovery and an API server that misbehaves in every way: what is known stays, and what changes is seen again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from fakes.api_server import ApiServer, Asked, Broken, Fault, is_list, is_watch
from fakes.router import until
from fakes.slices import endpoint, slice_of
from pdcluster_kube.access import KubeAccess
from pdcluster_kube.backoff import Backoff
from pdcluster_kube.reader import KubeReader
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.engines.discovery import GOOD_WATCH_S, EngineDiscovery, Source

pytestmark = pytest.mark.anyio

PATIENCE_S = 20.0
"""Where nobody is silent, a machine that stands still for a moment is no failure."""
BACKOFF = Backoff(first_s=0.1, most_s=0.3)
"""Bounds what the API server asks for too."""
SILENCE_S = 10.0
"""For those who wait for somebody that is. Who is not may stand still for less."""


@dataclass(frozen=True)
class Failure:
    """How things stood at a failure: the next attempt comes too soon to look then."""

    reason: str
    is_current: bool
    urls: tuple[str, ...]
    num_in_a_row: int


@dataclass
class Following:
    """A discovery that runs, and all that it has told."""

    api: ApiServer
    discovery: EngineDiscovery
    told: list[tuple[Member, ...]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def told_again(self, members: tuple[Member, ...]) -> None:
        self.told.append(members)

    def failed(self) -> None:
        it = self.discovery
        self.failures.append(Failure(it.reason, it.is_current, tuple(self.urls), it._num_in_a_row))

    @property
    def num_failures(self) -> int:
        return len(self.failures)

    @property
    def urls(self) -> list[str]:
        """Of the engines that were told last."""
        return [member.url for member in self.told[-1]] if self.told else []

    async def knows(self, *hosts: str) -> None:
        await until(lambda: self.urls == [f"http://{host}:8000" for host in hosts])

    def kinds(self) -> list[str]:
        return [asked.kind for asked in self.api.asked]


@asynccontextmanager
async def following(
    api: ApiServer,
    *,
    watch_timeout_s: int = 60,
    token_file: Path | None = None,
    silence_s: float = PATIENCE_S,
) -> AsyncIterator[Following]:
    """At the end the API server has no watch of it any more."""
    await api.start()
    client = KubeReader(KubeAccess(api.url, None, token_file), timeout_s=silence_s)
    source = Source(api.namespace, "c", watch_timeout_s, grace_s=silence_s)
    holder: list[Following] = []
    discovery = EngineDiscovery(
        client, source, lambda told: holder[0].told_again(told), lambda: holder[0].failed(), backoff=BACKOFF
    )
    holder.append(Following(api, discovery))
    task = asyncio.create_task(discovery.run())
    try:
        yield holder[0]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        api.unmute()
        await until(lambda: api.num_watches == 0)
        await api.stop()


def api_with(*hosts: str) -> ApiServer:
    api = ApiServer()
    for host in hosts:
        put(api, host)
    return api


def put(api: ApiServer, host: str) -> None:
    api.put(slice_of(f"s-{host}", "decode", endpoint(host, f"uid-{host}")))


# As it should be.


async def test_what_is_listed_is_told_and_each_change_by_the_watch() -> None:
    async with following(api_with("10.0.0.1")) as it:
        await it.knows("10.0.0.1")
        put(it.api, "10.0.0.2")
        await it.knows("10.0.0.1", "10.0.0.2")
        it.api.delete("s-10.0.0.1")
        await it.knows("10.0.0.2")
        assert it.kinds() == ["list", "watch"]
        assert (it.discovery.is_current, it.discovery.reason) == (True, "")


async def test_a_watch_that_ends_in_time_goes_on_from_its_last_version_without_a_list() -> None:
    async with following(api_with("10.0.0.1"), watch_timeout_s=1) as it:
        await it.knows("10.0.0.1")
        put(it.api, "10.0.0.2")
        await it.knows("10.0.0.1", "10.0.0.2")
        await until(lambda: it.kinds() == ["list", "watch", "watch"])
        assert it.api.asked[-1].query["resourceVersion"] == str(it.api.store.version)
        put(it.api, "10.0.0.3")
        await it.knows("10.0.0.1", "10.0.0.2", "10.0.0.3")
        assert it.num_failures == 0


async def test_a_bookmark_moves_the_version_on_and_nothing_is_told() -> None:
    async with following(api_with("10.0.0.1"), watch_timeout_s=1) as it:
        await until(lambda: it.api.num_watches == 1)
        it.api.put(slice_of("other", "decode", endpoint("10.9.9.9"), cluster="another"))
        it.api.bookmark()
        await until(lambda: it.kinds()[-2:] == ["watch", "watch"])
        assert it.api.asked[-1].query["resourceVersion"] == str(it.api.store.version)
        assert len(it.told) == 1


async def test_only_engines_slices_of_this_cluster_are_asked_for() -> None:
    api = api_with("10.0.0.1")
    api.put(slice_of("other", "decode", endpoint("10.9.9.9"), cluster="another"))
    api.put(slice_of("router", "router", endpoint("10.9.9.8")))
    async with following(api) as it:
        await it.knows("10.0.0.1")
        assert it.discovery.problems == frozenset()
        assert (
            it.api.asked[0].query["labelSelector"] == "pdcluster.dev/cluster=c,pdcluster.dev/role in (prefill,decode)"
        )


async def test_a_slice_that_cannot_be_used_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    api = api_with("10.0.0.1")
    async with following(api) as it:
        await it.knows("10.0.0.1")
        for port in range(2):
            api.put(slice_of("wrong", "decode", endpoint("10.0.0.7"), port_name="grpc", port=port))
        await until(lambda: len(it.told) == 3)
        assert it.urls == ["http://10.0.0.1:8000"]
        (line,) = caplog.messages
        assert "EndpointSlice wrong: no port is named http" in line


# What goes wrong.


FAULTS: Final = (429, 500, 403, 410, *Broken)


def fault_of(how: int | Broken, matches: Callable[[Asked], bool]) -> Fault:
    return Fault(matches, how, headers={"Retry-After": "1"} if how == 429 else {})


def silence_s(how: int | Broken) -> float:
    return SILENCE_S if how is Broken.HANG else PATIENCE_S


@pytest.mark.parametrize("how", FAULTS)
async def test_a_list_that_fails_is_logged_and_made_again(how: int | Broken, caplog: pytest.LogCaptureFixture) -> None:
    api = api_with("10.0.0.1")
    api.faults.append(fault_of(how, is_list))
    async with following(api, silence_s=silence_s(how)) as it:
        await it.knows("10.0.0.1")
        (failure,) = it.failures
        assert failure.reason
        assert (failure.urls, failure.is_current) == ((), False)
        first, second, *_ = it.api.asked
        assert second.at - first.at >= BACKOFF.first_s
        await until(lambda: it.discovery.is_current)
        (line,) = caplog.messages
        assert line.startswith("discovery is cut off from the API server")


@pytest.mark.parametrize("how", FAULTS)
async def test_a_watch_that_fails_leaves_what_is_known_and_everything_is_listed_again(how: int | Broken) -> None:
    async with following(api_with("10.0.0.1"), watch_timeout_s=1, silence_s=silence_s(how)) as it:
        await it.knows("10.0.0.1")
        it.api.faults.append(fault_of(how, is_watch))
        await until(lambda: it.num_failures == 1)
        assert it.failures[0].urls == ("http://10.0.0.1:8000",)
        put(it.api, "10.0.0.2")
        await it.knows("10.0.0.1", "10.0.0.2")
        assert it.kinds().count("list") == 2
        await until(lambda: it.discovery.is_current)


async def test_who_is_told_to_come_back_in_an_hour_comes_back_sooner() -> None:
    api = api_with("10.0.0.1")
    api.faults.append(Fault(is_list, 429, headers={"Retry-After": "3600"}))
    async with following(api) as it:
        await it.knows("10.0.0.1")


async def test_a_cut_watch_misses_nothing() -> None:
    async with following(api_with("10.0.0.1")) as it:
        await until(lambda: it.api.num_watches == 1)
        it.api.cut_watches()
        it.api.delete("s-10.0.0.1")
        put(it.api, "10.0.0.2")
        await it.knows("10.0.0.2")


@pytest.mark.parametrize(("lived_s", "num_in_a_row"), [(0.0, 6), (GOOD_WATCH_S + 1.0, 1)])
async def test_a_cut_of_a_watch_that_lived_long_is_the_first_failure_in_a_row(
    lived_s: float, num_in_a_row: int
) -> None:
    """It may have said nothing: engines do not come and go each day."""
    async with following(api_with("10.0.0.1")) as it:
        await until(lambda: it.discovery.is_current)
        it.discovery._num_in_a_row, it.discovery._opened_at = 5, time.monotonic() - lived_s
        it.api.cut_watches()
        await until(lambda: it.num_failures >= 1)
        assert it.failures[0].num_in_a_row == num_in_a_row


async def test_watches_that_are_cut_after_their_first_news_are_failures_in_a_row() -> None:
    async with following(api_with("10.0.0.1")) as it:
        await cut_after_news(it, "10.0.0.2")
        await cut_after_news(it, "10.0.0.3")
        assert [failure.num_in_a_row for failure in it.failures] == [1, 2]


async def cut_after_news(it: Following, host: str) -> None:
    num_failures = it.num_failures
    await until(lambda: it.discovery.is_current)
    put(it.api, host)
    await until(lambda: f"http://{host}:8000" in it.urls)
    it.api.cut_watches()
    await until(lambda: it.num_failures > num_failures)


async def test_a_version_that_is_too_old_means_another_list() -> None:
    async with following(api_with("10.0.0.1"), watch_timeout_s=1) as it:
        await until(lambda: it.api.num_watches == 1)
        it.api.put(slice_of("other", "decode", endpoint("10.9.9.9"), cluster="another"))
        it.api.forget_history()
        await until(lambda: it.num_failures == 1)
        assert "410" in it.failures[0].reason
        put(it.api, "10.0.0.2")
        await it.knows("10.0.0.1", "10.0.0.2")


async def test_a_watch_that_is_silent_beyond_its_time_is_opened_again() -> None:
    async with following(api_with("10.0.0.1"), watch_timeout_s=1, silence_s=SILENCE_S) as it:
        await until(lambda: it.api.num_watches == 1)
        it.api.mute()
        put(it.api, "10.0.0.2")
        await until(lambda: it.num_failures == 1)
        assert it.failures[0].urls == ("http://10.0.0.1:8000",)
        it.api.unmute()
        await it.knows("10.0.0.1", "10.0.0.2")


async def test_while_the_api_server_is_away_nothing_is_told_and_then_all_that_has_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with following(api_with("10.0.0.1")) as it:
        await until(lambda: it.discovery.is_current)
        await it.api.stop()
        await until(lambda: it.num_failures >= 2)
        assert len(it.told) == 1
        put(it.api, "10.0.0.2")
        it.api.forget_history()
        await it.api.start()
        await it.knows("10.0.0.1", "10.0.0.2")
        await until(lambda: it.discovery.is_current)
    lines = [message.split(" cluster=")[0].split(" reason=")[0] for message in caplog.messages]
    follows, cut_off = (
        "discovery follows the API server",
        "discovery is cut off from the API server, engines stay as they are",
    )
    assert lines == [follows, cut_off, follows]
    assert "127.0.0.1" not in caplog.text


async def test_the_token_is_read_anew_for_each_request(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("old\n")
    api = api_with("10.0.0.1")
    api.token = "old"
    async with following(api, watch_timeout_s=1, token_file=token_file) as it:
        await it.knows("10.0.0.1")
        await until(lambda: api.num_watches == 1)
        api.token = "new"
        token_file.write_text("new\n")
        await until(lambda: it.kinds().count("watch") == 2)
        assert api.asked[-1].authorization == "Bearer new"
        assert it.num_failures == 0


async def test_a_token_that_is_missing_or_wrong_is_told_with_the_cure(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    api = api_with("10.0.0.1")
    api.token = "right"
    async with following(api, token_file=token_file) as it:
        await until(lambda: it.num_failures >= 1)
        assert it.failures[0].reason == f"{token_file}: No such file or directory"
        token_file.write_text("wrong")
        await until(lambda: "401" in it.failures[-1].reason)
        assert "token file" in it.failures[-1].reason
        token_file.write_text("right")
        await it.knows("10.0.0.1")
