"""The chart's alerts on a real router's counts, as Prometheus itself judges them: silent on a pool that is well, there
with their fault, and gone after it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest
from tools.chart.dashboard import expressions

from fakes.certificates import Authority
from fakes.faults import Fault, Gate
from fakes.identity import RULES as RULES_OF_TOKENS
from fakes.identity import key_set, running_key_fake, signing_key
from fakes.reservations import reservation_call, reservation_of
from fakes.router import PROMPT, Rig, params_of, post, running_rig, send, until
from integration.test_router_engine_file import running_file_rig
from patience import PATIENCE_S
from pdcluster_protocol.secret import make_secret
from prometheus.alerts import RULES, are_readable, as_shown, came_and_went, without_a_number
from prometheus.evaluation import STEP_S, Evaluation, Sample, Scrapes, samples_of

pytestmark = pytest.mark.anyio

PLACE: Final = "team/tiny"
TARGET: Final = {"namespace": "team", "pod": "tiny-router-0", "pdcluster_dev_cluster": "tiny"}
"""What the chart's monitors and Prometheus put beside a router's own labels."""
QUICK: Final[Mapping[str, Any]] = {"probe_interval_s": 0.01}
WELL: Final = {"namespace": "other", "pod": "well-router-0", "pdcluster_dev_cluster": "well"}
"""Another pool, of which nothing may be told: each page is the first one of the router again."""
LEADER: Final = [Sample({"__name__": "pdcluster_operator_leading", "namespace": "pdcluster", "pod": "operator-0"}, "1")]
"""Without any operator an alert tells of that."""
NUM_BEFORE: Final = 12
NUM_DURING: Final = 24
"""Twelve minutes: longer than any range and ``for`` of these alerts together."""
NUM_AFTER: Final = 24
OTHER_SECRET: Final = make_secret("the secret of another pool")


@dataclass
class Watch:
    """A Prometheus that scrapes one router."""

    rig: Rig
    scrapes: Scrapes = field(default_factory=lambda: Scrapes(int(time.time())))
    first: bytes = b""

    async def scrape(self, num_steps: int, between: Callable[[Rig], Awaitable[object]] | None = None) -> None:
        """So many times, each after ``between``."""
        for _ in range(num_steps):
            if between is not None:
                await between(self.rig)
            page = await self._page()
            self.first = self.first or page
            self.scrapes.add(samples_of(page, TARGET), samples_of(self.first, WELL), LEADER)

    async def _page(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return (await (await self.rig.internal()).get("/metrics")).body

    async def evaluate(self, *asked: str) -> Evaluation:
        told = await asyncio.to_thread(self.scrapes.evaluate, RULES, asked)
        assert told.errors == []
        return told


@dataclass(frozen=True, slots=True)
class Case:
    """``fault`` begins and ends what the alert tells of. ``also``: alerts that tell of the same, with right."""

    fault: Callable[[Rig], AbstractAsyncContextManager[None]]
    also: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def no_decode(rig: Rig) -> AsyncIterator[None]:
    port = int(rig.decode.url.rpartition(":")[2])
    await rig.decode.stop()
    yield
    await rig.decode.start(port)
    await until(lambda: all(engine.is_healthy for engine in rig.router.services.all_engines()))


@asynccontextmanager
async def prefill_fails(rig: Rig) -> AsyncIterator[None]:
    rig.prefill.fault = Fault.ERROR_500
    yield
    rig.prefill.fault = Fault.NONE


@asynccontextmanager
async def one_is_unwell(rig: Rig) -> AsyncIterator[None]:
    rig.decode.health_status = 500
    await until(lambda: not all(engine.is_healthy for engine in rig.router.services.all_engines()))
    yield
    rig.decode.health_status = 200


@asynccontextmanager
async def prefill_is_full(rig: Rig) -> AsyncIterator[None]:
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig)
    await rig.prefill.next_request()
    yield
    rig.prefill.open_gate(Gate.PREFILL)
    async with asyncio.timeout(PATIENCE_S):
        assert (await client.receive()).status == 200


CASES: Final = {
    "PDClusterNoDecode": Case(no_decode, frozenset({"PDClusterRequestsFail", "PDClusterEngineDown"})),
    "PDClusterPrefillExhausted": Case(prefill_fails, frozenset({"PDClusterRequestsFail"})),
    "PDClusterRequestsFail": Case(prefill_fails, frozenset({"PDClusterPrefillExhausted"})),
    "PDClusterEngineDown": Case(one_is_unwell),
    "PDClusterOverloaded": Case(prefill_is_full, settings={"max_prefill_backlog_tokens": 1, "max_queued_requests": 0}),
}


@pytest.mark.parametrize("name", CASES)
async def test_an_alert_comes_with_its_fault_and_goes_after_it(name: str) -> None:
    case = CASES[name]
    num_decode = 2 if name == "PDClusterEngineDown" else 1
    async with running_rig(num_decode=num_decode, **QUICK, **case.settings) as rig:
        watch = Watch(rig)
        await watch.scrape(NUM_BEFORE, post)
        begins_s = watch.scrapes.now_s
        async with case.fault(rig):
            await watch.scrape(NUM_DURING, post)
        await watch.scrape(NUM_AFTER, post)
    came_and_went(await watch.evaluate(), {name, *case.also}, PLACE, begins_s, watch.scrapes.now_s - STEP_S)


DISCOVERY_PANELS: Final = [as_shown(one) for one in expressions() if "pdcluster_router_discovery_up" in one]
PANELS: Final = [as_shown(one) for one in expressions() if "pdcluster_router_" in one]
URL_PANELS: Final = [as_shown(one) for one in expressions() if "pdcluster_router_token_keys" in one]
PANELS_OF_A_NAMED_POOL: Final = [one for one in PANELS if one not in (*DISCOVERY_PANELS, *URL_PANELS)]


async def call_with_another_secret(rig: Rig) -> None:
    call = await rig.internal()
    await call.send(reservation_call(reservation_of(params_of()), OTHER_SECRET))
    async with asyncio.timeout(PATIENCE_S):
        assert (await call.receive()).status == 403


async def test_another_secret_is_told() -> None:
    async with running_rig() as rig:
        watch = Watch(rig)
        await watch.scrape(NUM_BEFORE, post)
        begins_s = watch.scrapes.now_s
        await watch.scrape(NUM_DURING, call_with_another_secret)
        await watch.scrape(NUM_AFTER, post)
    came_and_went(await watch.evaluate(), {"PDClusterSecretsDiffer"}, PLACE, begins_s, watch.scrapes.now_s - STEP_S)


async def test_engines_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    async with running_file_rig(tmp_path / "engines") as rig:
        watch = Watch(rig)
        await watch.scrape(NUM_BEFORE)
        begins_s, discovery = watch.scrapes.now_s, rig.router.services.engine_file
        assert discovery is not None
        rig.path.write_text("prefill")
        await until(lambda: not discovery.is_current)
        await watch.scrape(NUM_DURING)
        rig.name(*rig.prefills, *rig.decodes)
        await until(lambda: discovery.is_current)
        await watch.scrape(NUM_AFTER)
    told = await watch.evaluate(*DISCOVERY_PANELS)
    came_and_went(told, {"PDClusterDiscoveryDown"}, PLACE, begins_s, watch.scrapes.now_s - STEP_S)
    assert [[sample.value for sample in found] for found in told.found.values()] == [["2"], ["2"]]


@pytest.mark.parametrize(("days", "is_told"), [(2, True), (4, False)])
async def test_a_certificate_that_ends_soon_is_told(
    tmp_path: Path, authority: Authority, days: int, *, is_told: bool
) -> None:
    files = authority.issue(ends=timedelta(days=days)).write(tmp_path)
    async with running_rig(**files) as rig:
        watch = Watch(rig)
        await watch.scrape(1)
        watch.scrapes.repeat(130)
    firing = (await watch.evaluate()).firing()
    assert firing.keys() == ({"PDClusterCertificateExpires"} if is_told else set())
    for alerts in firing.values():
        are_readable((one for one in alerts if one.labels["namespace"] == TARGET["namespace"]), PLACE)


async def test_keys_of_tokens_that_have_not_been_read_for_a_day_are_told() -> None:
    async with (
        running_key_fake(key_set(signing_key())) as server,
        running_rig(jwt_key_set=server.url, **RULES_OF_TOKENS) as rig,
    ):
        watch, check = Watch(rig), rig.router.access.tokens
        assert check is not None
        await watch.scrape(NUM_BEFORE)
        begins_s, read_at = watch.scrapes.now_s, check.read_at
        check.read_at -= 90_001
        await watch.scrape(NUM_DURING)
        check.read_at = read_at
        await watch.scrape(NUM_AFTER)
    told = await watch.evaluate(*URL_PANELS)
    came_and_went(told, {"PDClusterTokenKeysOld"}, PLACE, begins_s, watch.scrapes.now_s - STEP_S)
    assert without_a_number(told) == []


async def test_each_panel_of_a_router_shows_a_number(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(b'key').hexdigest()} team-a max_concurrent=8\n")
    lists = [json.dumps({"object": "list", "data": [{"id": model}]}).encode() for model in "abab"]
    settings = {"max_prefill_backlog_tokens": 1, "api_key_file": keys, **QUICK}
    async with running_rig(num_prefill=2, num_decode=2, models=lists, **settings) as rig:
        watch = Watch(rig)
        await watch.scrape(NUM_BEFORE, ask_both_models)
    told = await watch.evaluate(*PANELS_OF_A_NAMED_POOL)
    assert without_a_number(told) == []
    (ended,) = [found for asked, found in told.found.items() if "router_requests_total" in asked]
    rates = {sample.labels["outcome"]: float(sample.value) for sample in ended}
    assert rates.pop("ok") == pytest.approx(4 / STEP_S)
    assert set(rates.values()) == {0}


async def ask_both_models(rig: Rig) -> None:
    """Twice each at once: one of two has to wait. They are streams that tell their usage."""
    headers = {"authorization": "Bearer key"}
    body = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    answers = await asyncio.gather(*(post(rig, {**body, "model": model}, headers) for model in "aabb"))
    assert [answer.status for answer in answers] == [200] * 4
