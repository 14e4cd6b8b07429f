"""Many requests for one model, and some for another: they do not wait for each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fakes.answers import models_answer
from fakes.faults import Gate
from fakes.http import RawClient
from fakes.router import PROMPT, Rig, post, running_rig, send, until
from integration.test_router_ahead import about
from patience import EDGE_S
from pdcluster_protocol.labels import Role
from pdcluster_protocol.pool_page import POOL_PATH

pytestmark = pytest.mark.anyio

LLAMA, QWEN = models_answer("llama", sql="/adapters/sql"), models_answer("qwen")
NEEDED: dict[str, Any] = {"num_prefill": 2, "num_decode": 2, "models": [LLAMA, QWEN, LLAMA, QWEN]}


def asking(model: str) -> dict[str, Any]:
    return {**PROMPT, "model": model}


@asynccontextmanager
async def crowded_rig(num: int = 6, **settings: Any) -> AsyncIterator[tuple[Rig, list[RawClient]]]:
    """A pair for each of two models; of ``num`` requests for the first one, all but one wait."""
    async with running_rig(**NEEDED, max_prefill_backlog_tokens=4, **settings) as rig:
        rig.prefills[0].close_gate(Gate.PREFILL)
        crowd = [await send(rig, asking("llama"), **{"x-request-id": f"crowd-{number}"}) for number in range(num)]
        await until(lambda: len(rig.prefills[0].seen) + rig.router.services.num_queued == num)
        assert rig.router.services.num_queued > 0
        yield rig, crowd
        rig.prefills[0].open_gate(Gate.PREFILL)
        for client in crowd:
            assert (await client.receive()).status == 200
        await rig.settled()


async def test_another_models_requests_enter_at_once() -> None:
    async with crowded_rig() as (rig, _):
        for _ in range(3):
            assert (await post(rig, asking("qwen"))).status == 200
        assert len(rig.prefills[1].seen) == 3


async def test_a_full_queue_is_that_of_its_model_and_of_its_adapters() -> None:
    async with crowded_rig(max_queued_requests=2) as (rig, _):
        assert rig.router.services.num_queued == 2
        assert (await post(rig, asking("llama"))).status == 429
        assert (await post(rig, asking("sql"))).status == 429
        assert (await post(rig, asking("qwen"))).status == 200


async def test_the_metrics_tell_how_many_wait_for_each_model() -> None:
    async with crowded_rig() as (rig, _):
        num = rig.router.services.num_queued
        assert await rig.metric("pdcluster_router_queue_length") == num
        assert await rig.metric('pdcluster_router_model_queue_length{model="llama"}') == num
        assert await rig.metric('pdcluster_router_model_queue_length{model="qwen"}') == 0


async def test_the_pages_tell_all_queues_together_and_each_requests_own() -> None:
    async with crowded_rig() as (rig, _):
        internal = await rig.internal()
        page = (await internal.get(POOL_PATH)).json()
        assert page["requests"]["queued"] == {"prefill": rig.router.services.num_queued, "decode": 0}
        llama = rig.router.services.admissions.find("llama")
        assert llama is not None
        prefill = llama[Role.PREFILL]
        assert page["requests"]["backlog_tokens"]["prefill"] == prefill.backlog_tokens > 0
        assert await rig.metric("pdcluster_router_prefill_backlog_tokens") == prefill.backlog_tokens
    async with crowded_rig() as (rig, crowd):
        rig.prefills[0].open_gate(Gate.PREFILL)
        for client in crowd[:-1]:
            assert (await client.receive()).status == 200
        assert (await crowd[-1].receive()).status == 200
        told = (await about(rig, "crowd-5")).ahead
        assert told is not None
        assert (told.queue, told.model) == ("prefill", "llama")
        assert told.num_known == told.num_requests
        crowd.clear()


async def test_a_request_that_waits_is_served_although_engines_come_to_serve_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdcluster_router.engines.health.PROBES_FOR_LIST", 1)
    one = {**NEEDED, "models": [LLAMA] * 4}
    async with running_rig(**one, max_prefill_backlog_tokens=4, probe_interval_s=EDGE_S / 1000) as rig:
        for prefill in rig.prefills:
            prefill.close_gate(Gate.PREFILL)
        crowd = [await send(rig, asking("llama")) for _ in range(12)]
        shared = rig.router.services.admissions.shared[Role.PREFILL]
        await until(lambda: shared.num_queued > 0)
        rig.prefills[1].models = rig.decodes[1].models = QWEN
        all_engines = rig.router.services.all_engines
        await until(lambda: sum(one.listing is not None and "qwen" in one.listing.bases for one in all_engines()) == 2)
        assert rig.router.services.admissions.models == {"llama", "qwen"}
        for prefill in rig.prefills:
            prefill.open_gate(Gate.PREFILL)
        for client in crowd:
            assert (await client.receive()).status == 200
        assert (await post(rig, asking("qwen"))).status == 200
        await rig.settled()


async def test_a_model_that_is_the_only_one_again_keeps_its_queue_and_all_its_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdcluster_router.engines.health.PROBES_FOR_LIST", 1)
    async with crowded_rig(probe_interval_s=EDGE_S / 1000) as (rig, _):
        llama = rig.router.services.admissions.find("llama")
        assert llama is not None
        num_waiting = llama[Role.PREFILL].num_queued
        rig.prefills[1].models = rig.decodes[1].models = LLAMA
        all_engines = rig.router.services.all_engines
        await until(lambda: all(one.listing is not None and "llama" in one.listing.bases for one in all_engines()))
        assert (await post(rig, asking("qwen"))).status == 404
        await until(lambda: llama[Role.PREFILL].num_queued < num_waiting)
        assert rig.router.services.admissions.shared[Role.PREFILL].backlog_tokens == 0
