"""Engines come, change and go in EndpointSlices while requests run: nobody is cut."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fakes import api_server
from fakes.engine import FakeEngine, Wire
from fakes.faults import Gate
from fakes.http import RawClient, request_bytes
from fakes.kube_rig import num_seen, running_kube_rig, serve
from fakes.router import COMPLETIONS, PROMPT, STREAM, Rig, post, running_server, send, until
from fakes.slices import endpoint, slice_of
from patience import PATIENCE_S
from pdcluster_router.front import app

pytestmark = pytest.mark.anyio


# It starts.


@asynccontextmanager
async def one_that_starts_behind_a_service(**settings: Any) -> AsyncIterator[str]:
    """The URL of a router that starts where engines are already, and takes its time for that."""
    wire, api = Wire(), api_server.ApiServer()
    prefill, decode = FakeEngine(wire), FakeEngine(wire)
    await api.start()
    for engine, role in ((prefill, "prefill"), (decode, "decode")):
        await engine.start()
        host, _, port = engine.url.removeprefix("http://").partition(":")
        api.put(slice_of(role, role, endpoint(host, role, ready=True), port=int(port)))
    found = {"discovery": "kubernetes", "namespace": api.namespace, "cluster": "c", "kube_api": api.url}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "START_S", PATIENCE_S)
        async with running_server(**found, **settings) as (_, url):
            yield url
    await api.stop()
    for engine in (prefill, decode):
        await engine.stop()


async def test_a_router_that_starts_behind_a_service_answers_its_very_first_request() -> None:
    async with one_that_starts_behind_a_service() as url:
        answer = await (await RawClient.connect(url)).post(COMPLETIONS, PROMPT)
        assert answer.status == 200, answer.body


async def test_an_alias_that_is_an_engines_own_name_keeps_no_router_from_starting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One engine could else stop all of a pool's routers."""
    async with one_that_starts_behind_a_service(model_aliases=["m=other"]) as url:
        answer = await (await RawClient.connect(url)).post(COMPLETIONS, PROMPT)
        assert answer.status == 404, "the alias holds, and nobody serves its model"
    assert sum("alias hides a model alias=m alias_of=other" in message for message in caplog.messages) == 1


async def test_a_router_whose_api_server_is_silent_opens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "START_S", 0.2)
    api = api_server.ApiServer()
    api.faults.append(api_server.Fault(api_server.is_list, api_server.Broken.HANG))
    await api.start()
    found = {"discovery": "kubernetes", "namespace": api.namespace, "cluster": "c", "kube_api": api.url}
    async with running_server(**found) as (_, url):
        health = await (await RawClient.connect(url)).get("/health")
        assert (health.status, health.json()["error"]["code"]) == (503, "not_ready")
    await api.stop()


# They come.


async def test_an_engine_that_is_added_gets_work_at_once() -> None:
    async with running_kube_rig() as rig:
        prefill, decode = await rig.start("prefill"), await rig.start("decode")
        await rig.usable(prefill, decode)
        await serve(rig, 4)
        assert num_seen(*rig.prefills, *rig.decodes) == [2, 2, 2, 2]


async def test_a_router_without_engines_says_so_and_works_as_soon_as_there_are_some() -> None:
    async with running_kube_rig(pairs=0) as rig:
        health = await (await rig.client()).get("/health")
        assert (health.status, health.json()["error"]["code"]) == (503, "not_ready")
        answer = await post(rig)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_decode_engine")
        await rig.usable(await rig.start("prefill"), await rig.start("decode"))
        assert (await (await rig.client()).get("/health")).status == 200
        await serve(rig, 1)


async def test_each_prefill_engine_that_comes_or_goes_moves_the_limit_of_admission() -> None:
    async with running_kube_rig(max_prefill_backlog_tokens=1) as rig:
        second = await rig.start("prefill")
        await rig.usable(second)
        for engine in rig.prefills:
            engine.close_gate(Gate.PREFILL)
        services = rig.router.services
        clients = [await send(rig) for _ in range(4)]
        await until(lambda: (len(services.running), services.num_queued) == (2, 2))
        third = await rig.start("prefill")
        await until(lambda: (len(services.running), services.num_queued) == (2, 0))
        for engine in rig.prefills[:2]:
            engine.open_gate(Gate.PREFILL)
        assert [(await client.receive()).status for client in clients] == [200] * 4
        assert len(third.seen) == 2, "the two that waited, one after the other"


# They go.


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_terminating_engine_gets_nothing_and_what_runs_there_ends_whole(role: str) -> None:
    async with running_kube_rig() as rig:
        old = rig.prefill if role == "prefill" else rig.decode
        gate = Gate.PREFILL if role == "prefill" else Gate.SECOND_TOKEN
        old.close_gate(gate)
        client = await send(rig, STREAM)
        await rig.prefill.next_request()
        await rig.usable(await rig.start(role))
        rig.terminate(old)
        await rig.becomes(old, "finishing")
        await serve(rig, 3)
        assert len(old.seen) == 1
        old.open_gate(gate)
        answer = await client.receive()
        assert (answer.status, answer.is_whole) == (200, True)
        assert answer.body.count(b"data: ") == 5


async def test_an_engine_that_is_listed_no_more_is_removed_when_its_last_request_has_ended() -> None:
    async with running_kube_rig() as rig:
        await rig.usable(await rig.start("decode"))
        old = rig.decode
        old.close_gate(Gate.SECOND_TOKEN)
        clients = [await send(rig, STREAM) for _ in range(2)]
        await until(lambda: len(old.seen) == 1)
        rig.unlist(old)
        await rig.becomes(old, "leaving")
        await serve(rig, 2)
        assert (rig.state(old), len(old.seen)) == ("leaving", 1)
        old.open_gate(Gate.SECOND_TOKEN)
        assert [(await client.receive()).is_whole for client in clients] == [True, True]
        await rig.becomes(old, "")


async def test_an_idle_engine_that_terminates_keeps_no_connection_and_is_not_probed() -> None:
    async with running_kube_rig(probe_interval_s=0.02) as rig:
        await rig.usable(await rig.start("decode"))
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        clients = [await send(rig, STREAM) for _ in range(4)]
        await until(lambda: len(rig.decode.seen) == 2)
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        assert all([(await client.receive()).is_whole for client in clients])
        assert (
            len(rig.decode.open_connections) >= 2
        )  # A probe that is under way uses one of them, and it closes anyway.
        rig.terminate(rig.decode)
        await rig.becomes(rig.decode, "finishing")
        await until(lambda: not rig.decode.open_connections)
        num_connections = rig.decode.num_connections
        await asyncio.sleep(0.2)
        assert rig.decode.num_connections == num_connections
        rig.unlist(rig.decode)
        await rig.becomes(rig.decode, "")


async def test_an_idle_prefill_engine_that_terminates_is_probed_for_it_may_be_the_last_of_its_revision() -> None:
    async with running_kube_rig(probe_interval_s=0.02) as rig:
        old = rig.prefill
        rig.terminate(old)
        await rig.becomes(old, "finishing")
        known = rig.known(old)
        assert known is not None
        assert known.is_healthy
        await old.stop()
        await until(lambda: not known.is_healthy)
        rig.unlist(old)
        await rig.becomes(old, "")


async def test_a_pod_at_the_address_of_another_one_is_a_new_engine() -> None:
    async with running_kube_rig() as rig:
        before = rig.known(rig.decode)
        rig.listed[rig.decode.url].name = "reborn"
        rig.mark(rig.decode)
        rig.api.delete("s1")
        await until(lambda: rig.known(rig.decode) not in (before, None))
        await rig.usable(rig.decode)
        await serve(rig, 1)
        assert await rig.metric(f'pdcluster_router_engine_up{{engine="{rig.decode.url}",role="decode"}}') == 1


async def test_engines_that_are_gone_are_gone_from_the_metrics() -> None:
    async with running_kube_rig(pairs=2) as rig:
        count = 'pdcluster_router_engines{revision="r1",role="decode",state="serving"}'
        assert await rig.metric(count) == 2
        rig.unlist(rig.decode)
        await rig.becomes(rig.decode, "")
        assert await rig.metric(count) == 1
        with pytest.raises(KeyError):
            await rig.metric(f'pdcluster_router_engine_up{{engine="{rig.decode.url}",role="decode"}}')


async def test_a_request_that_a_terminating_decode_surely_never_read_goes_to_another_one() -> None:
    async with running_kube_rig() as rig:
        old, new = rig.decode, await rig.start("decode")
        await rig.usable(new)
        known = rig.known(new)
        assert known is not None
        known.take(1000)  # So that the old one is chosen.
        client = await rig.client()
        assert (await client.get("/health")).status == 200
        old.hang_up_on_all()
        rig.feed(client, request_bytes(COMPLETIONS, json.dumps(PROMPT).encode()))
        rig.mark_now(old, is_terminating=True)
        assert (await client.receive()).status == 200
        assert num_seen(old, new) == [0, 1]
        known.give_back(1000)


# The API server goes.


async def test_the_loss_of_the_api_server_changes_nothing_and_is_told() -> None:
    async with running_kube_rig(pairs=2) as rig:
        assert await rig.metric("pdcluster_router_discovery_up") == 1
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        clients = [await send(rig, STREAM) for _ in range(2)]
        await until(lambda: bool(rig.decode.seen))
        await rig.api.stop()
        await until(lambda: rig.router.services.discovery is not None and not rig.router.services.discovery.is_current)
        await serve(rig, 4)
        assert num_seen(*rig.decodes) == [2, 4]
        assert [rig.state(engine) for engine in (*rig.prefills, *rig.decodes)] == ["serving"] * 4
        assert await rig.metric("pdcluster_router_discovery_up") == 0
        assert (await (await rig.client()).get("/health")).status == 200
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        assert [(await client.receive()).is_whole for client in clients] == [True, True]
        rig.unlist(rig.decode)
        await rig.api.start()
        await rig.becomes(rig.decode, "")


# The page.


async def test_the_pools_page_shows_every_engines_revision_and_state() -> None:
    async with running_kube_rig() as rig:
        await rig.usable(await rig.start("decode", "r2"))
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, STREAM)
        await client.reader.readuntil(b"Hello")
        rig.terminate(rig.decode)
        await rig.becomes(rig.decode, "finishing")
        page: dict[str, Any] = (await (await rig.internal()).get("/pdcluster/pool")).json()
        assert page["discovery"] == {"kind": "kubernetes", "is_current": True, "reason": "", "unusable_slices": []}
        assert page["revisions"] == [
            {"revision": "r1", "serving": {"prefill": 1, "decode": 0}, "serves": False},
            {"revision": "r2", "serving": {"prefill": 0, "decode": 1}, "serves": False},
        ]
        shown = {(one["name"], one["pod"]): (one["revision"], one["state"], one["running"]) for one in page["engines"]}
        assert shown == {
            ("prefill-0", "pod-uid-s0"): ("r1", "serving", 0),
            ("decode-0", "pod-uid-s1"): ("r1", "finishing", 1),
            ("decode-1", "pod-uid-s2"): ("r2", "serving", 0),
        }
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        assert (await client.reader.readuntil(b"0\r\n\r\n")).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")


async def test_engines_that_are_named_are_on_the_page_too(rig: Rig) -> None:
    page: dict[str, Any] = (await (await rig.internal()).get("/pdcluster/pool")).json()
    assert page["discovery"] == {"kind": "static"}
    assert page["revisions"] == [{"revision": "", "serving": {"prefill": 1, "decode": 1}, "serves": True}]
    assert page["policy"] == "least-tokens"
    assert [(one["name"], one["state"]) for one in page["engines"]] == [
        ("prefill-0", "serving"),
        ("decode-0", "serving"),
    ]


async def test_an_engines_life_is_one_line_for_each_change_without_its_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running_kube_rig() as rig:
        rig.terminate(rig.decode)
        await rig.becomes(rig.decode, "finishing")
        rig.unlist(rig.decode)
        await rig.becomes(rig.decode, "")
    lines = [message for message in caplog.messages if "engine=decode-0" in message]
    tail = "role=decode engine=decode-0 revision=r1 pod=pod-uid-s1 state="
    assert lines == [
        f"engine added {tail}serving",
        "engine healthy role=decode engine=decode-0",
        f"engine draining {tail}finishing",
        f"engine removed {tail}leaving",
    ]
    assert "127.0.0.1" not in caplog.text
