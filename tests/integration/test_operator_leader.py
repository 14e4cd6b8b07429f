"""Candidates for one Lease on an API server: who acts, until when, and what the Lease says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from fakes.api_server import ApiServer, Broken, Fault, is_parting
from fakes.router import until
from patience import EDGE_S, PATIENCE_S
from pdcluster_kube.access import KubeAccess
from pdcluster_kube.session import open_session
from pdcluster_operator.core.leasing import LeaseTimes
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.leader import Leader

pytestmark = pytest.mark.anyio

AT = ("leases", "system", "op")
TIMES = LeaseTimes(1.0, 0.6, 0.1)


@dataclass
class Clock:
    """Of all candidates of a test, and moved by it alone: a machine that stands still ends no term."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


class Unhurried:
    """The real clock, but for stalls of the machine: each is a fifth of a second to it at most."""

    def __init__(self) -> None:
        self._seconds, self._seen = 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._seconds, self._seen = self._seconds + min(now - self._seen, 0.2), now
        return self._seconds


@dataclass
class Acting:
    """Who acts now, and every term that there was."""

    now: list[str] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)
    """Whoever was told to end its work."""
    most: int = 0


class Candidate:
    """A leader whose work is to note that it acts."""

    def __init__(
        self, api: ApiServer, session: aiohttp.ClientSession, name: str, acting: Acting, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self._api = api
        self._acting = acting
        self.may_end = asyncio.Event()
        """Its work ends, when it is told to, not before this is set."""
        self.may_end.set()
        kube = HttpKube(session, api.url, timeout_s=EDGE_S, fence=None)
        self.leader = Leader(
            kube, namespace="system", name="op", identity=name, times=TIMES, lead=self._act, clock=clock
        )
        self.task = asyncio.create_task(self.leader.run())

    async def _act(self) -> None:
        acting = self._acting
        acting.now.append(self.name)
        acting.terms.append(self.name)
        acting.most = max(acting.most, len(acting.now))
        try:
            await asyncio.Event().wait()
        finally:
            acting.ending.append(self.name)
            await self.may_end.wait()
            acting.now.remove(self.name)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def die(self) -> None:
        """Without a word."""
        self._api.faults.append(Fault(is_parting, 403))
        await self.stop()


@asynccontextmanager
async def candidates(
    *names: str, clock: Callable[[], float] | None = None
) -> AsyncIterator[tuple[ApiServer, dict[str, Candidate], Acting]]:
    """Time stands still but where the test moves its ``clock``."""
    api, acting, clock = ApiServer(), Acting(), clock or Clock()
    await api.start()
    async with open_session(KubeAccess(api.url)) as session:
        found = {name: Candidate(api, session, name, acting, clock) for name in names}
        try:
            yield api, found, acting
        finally:
            for candidate in found.values():
                await candidate.stop()
    await api.stop()


def spec(api: ApiServer) -> dict[str, object]:
    found: dict[str, object] = api.store.read(AT)["spec"]
    return found


async def looks(api: ApiServer, num: int = 2) -> None:
    """The only candidate that lives has seen the Lease so often from now on."""
    api.asked.clear()
    await until(lambda: len([one for one in api.asked if one.method == "GET"]) > num)


async def renewed(api: ApiServer) -> None:
    before = spec(api)["renewTime"]
    await until(lambda: spec(api)["renewTime"] != before)


async def test_one_of_many_leads_and_goes_on_leading() -> None:
    clock = Clock()
    async with candidates("a", "b", "c", clock=clock) as (api, found, acting):
        await until(lambda: len(acting.now) == 1)
        leader = found[acting.now[0]].leader
        for _ in range(5):  # More than the duration, in steps of half a term.
            clock.seconds += TIMES.renew_s / 2
            await until(lambda: leader.left_s() > 0.9 * TIMES.renew_s)
        assert acting.terms == acting.now
        assert acting.most == 1
        assert spec(api)["holderIdentity"] == acting.now[0]
        assert spec(api)["leaseTransitions"] == 0


async def test_a_leader_that_leaves_is_followed_at_once() -> None:
    async with candidates("a", "b") as (_, found, acting):
        await until(lambda: len(acting.now) == 1)
        [first] = acting.now
        await found[first].stop()
        assert acting.now == []
        assert found[first].leader.left_s() <= 0
        await until(lambda: len(acting.now) == 1)  # On a clock that stands still: the duration is not waited for.


@pytest.mark.parametrize(
    ("holder", "told"),
    [("a", "lease given back"), ("b", "lease is not ours any more"), (None, "lease is not ours any more")],
    ids=["ours", "another one's", "gone"],
)
async def test_who_leaves_says_whether_it_gave_the_lease_back(
    holder: str | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with candidates("a") as (api, found, acting):
        await until(lambda: acting.now == ["a"])
        if holder is None:
            api.store.delete(AT)
        else:
            api.store.merge(AT, {"spec": {"holderIdentity": holder}})
        with caplog.at_level(logging.INFO, "pdcluster_operator.leader"):
            await found["a"].stop()
        said = [one.getMessage() for one in caplog.records if one.getMessage().startswith("lease ")]
        assert said == [f"{told} lease=Lease system/op"]
        if holder:
            assert spec(api)["holderIdentity"] == {"a": "", "b": "b"}[holder], "another one's is left alone"


async def test_a_lease_whose_last_renewal_was_cut_off_but_heard_is_given_back() -> None:
    """Whoever renews when it is told to stop does not learn the version that it has made."""
    async with candidates("a") as (api, found, acting):
        await until(lambda: acting.now == ["a"])
        api.store.merge(AT, {"metadata": {"labels": {"renewed": "unheard"}}})
        await found["a"].stop()
        assert spec(api)["holderIdentity"] == ""
        assert api.store.read(AT)["metadata"]["labels"] == {"renewed": "unheard"}


async def test_a_renewal_that_is_heard_between_the_look_and_the_word_costs_another_look() -> None:
    async with candidates("a") as (api, found, acting):
        await until(lambda: acting.now == ["a"])
        api.faults.append(Fault(is_parting, 409))
        await found["a"].stop()
        assert spec(api)["holderIdentity"] == ""


async def test_a_lease_is_given_back_when_the_work_has_ended_and_not_before() -> None:
    async with candidates("a") as (api, found, acting):
        await until(lambda: acting.now == ["a"])
        found["a"].may_end.clear()
        stopping = asyncio.create_task(found["a"].stop())
        await until(lambda: acting.ending == ["a"])
        try:
            await asyncio.sleep(0.2)  # Time enough to give it back, if it were not waited for.
            assert (acting.now, spec(api)["holderIdentity"]) == (["a"], "a")
        finally:
            found["a"].may_end.set()
            await stopping
        assert (acting.now, spec(api)["holderIdentity"]) == ([], "")


async def test_a_parting_word_that_nobody_answers_is_not_waited_for_beyond_its_deadline() -> None:
    """Whatever time a call may take: Kubernetes kills who takes too long to go."""
    api = ApiServer()
    await api.start()

    async def lead() -> None:
        await asyncio.Event().wait()

    async with open_session(KubeAccess(api.url)) as session:
        kube = HttpKube(session, api.url, timeout_s=60.0, fence=None)
        leader = Leader(kube, namespace="system", name="op", identity="a", times=TIMES, lead=lead, parting_s=3.0)
        task = asyncio.create_task(leader.run())
        await until(lambda: leader.is_leading)
        unheard = Fault(is_parting, Broken.HANG)
        api.faults.append(unheard)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
        task.cancel()
        assert (bool(done), unheard.times) == (True, 0)
    await api.stop()


async def test_a_leader_that_dies_is_followed_after_the_duration() -> None:
    clock = Clock()
    async with candidates("a", "b", clock=clock) as (api, found, acting):
        await until(lambda: len(acting.now) == 1)
        [first] = acting.now
        await found[first].die()
        await looks(api)  # What the dead one wrote last is seen.
        clock.seconds += TIMES.duration_s - 0.01
        await looks(api)
        assert acting.now == []
        clock.seconds += 0.02
        await until(lambda: len(acting.now) == 1)
        assert spec(api)["leaseTransitions"] == 1


@pytest.mark.parametrize("num_renewals", [1, 7], ids=["early in a term", "later"])
async def test_a_leader_that_cannot_renew_stops_before_another_may_begin(num_renewals: int) -> None:
    """The API server still answers the other one's requests. When it wakes next depends on how long it leads."""
    async with candidates("a", "b", clock=Unhurried()) as (api, found, acting):
        await until(lambda: len(acting.now) == 1)
        [first] = acting.now
        await until(lambda: all(one.leader.holder == first for one in found.values()))
        for _ in range(num_renewals):
            await renewed(api)

        def is_the_firsts(asked: object) -> bool:
            body = getattr(asked, "body", None) or {}
            return bool(body.get("spec", {}).get("holderIdentity") == first)

        api.faults.append(Fault(is_the_firsts, 500, times=999))
        await until(lambda: len(acting.terms) == 2)
        assert acting.terms[1] != first
        assert not found[first].leader.is_leading
        assert acting.most == 1


async def test_a_lost_lease_is_won_again_when_the_api_server_is_back() -> None:
    clock = Clock()
    async with candidates("a", clock=clock) as (api, _, acting):
        await until(lambda: acting.now == ["a"])
        await api.stop()
        clock.seconds += TIMES.renew_s
        await until(lambda: acting.now == [])
        await api.start()
        await until(lambda: acting.now == ["a"])
        assert acting.terms == ["a", "a"]


async def test_a_lease_that_somebody_deleted_is_made_again_by_its_holder() -> None:
    """Who has seen the holder waits for it; only who starts at that very moment cannot know."""
    async with candidates("a", "b") as (api, found, acting):
        await until(lambda: len(acting.now) == 1 and all(one.leader.holder for one in found.values()))
        api.store.delete(AT)
        await until(lambda: AT in api.store.objects)
        assert spec(api)["holderIdentity"] == acting.now[0]
        assert acting.most == 1


async def test_labels_of_a_lease_and_its_acquire_time_stay() -> None:
    async with candidates("a") as (api, _, acting):
        await until(lambda: acting.now == ["a"])
        acquired = spec(api)["acquireTime"]
        api.store.merge(AT, {"metadata": {"labels": {"kept": "yes"}}})
        for _ in range(2):
            await renewed(api)
        assert api.store.read(AT)["metadata"]["labels"] == {"kept": "yes"}
        assert spec(api)["acquireTime"] == acquired
        assert spec(api)["renewTime"] != acquired
        assert acting.terms == ["a"]


async def test_an_acquire_time_is_its_holders_own() -> None:
    async with candidates("a", "b") as (api, found, acting):
        await until(lambda: len(acting.now) == 1)
        [first], acquired = acting.now, str(spec(api)["acquireTime"])
        await found[first].stop()
        await until(lambda: len(acting.now) == 1)
        assert acting.now != [first]
        assert str(spec(api)["acquireTime"]) > acquired


async def test_a_term_that_breaks_ends_the_leader_with_its_error() -> None:
    api = ApiServer()
    await api.start()

    async def act() -> None:
        raise ValueError("a bug of ours")

    async with open_session(KubeAccess(api.url)) as session:
        kube = HttpKube(session, api.url, timeout_s=EDGE_S, fence=None)
        leader = Leader(kube, namespace="system", name="op", identity="a", times=TIMES, lead=act)
        with pytest.raises(ExceptionGroup) as caught:
            await leader.run()
        assert caught.group_contains(ValueError, match="a bug of ours")
        assert spec(api)["holderIdentity"] == ""
    await api.stop()
