"""The news that ``Services`` has for those who ask for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdcluster_protocol.labels import Role
from pdcluster_protocol.secret import make_secret
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.services import Services
from pdcluster_router.settings.router_settings import build_settings

pytestmark = pytest.mark.anyio


def make_services() -> Services:
    settings = build_settings(prefill_urls=["http://p:1"], decode_urls=["http://d:2"], internal_port=9)
    return Services(settings, make_secret("s" * 32))


async def test_room_is_told_once_in_the_next_turn_of_the_loop_however_often_it_was_made() -> None:
    services = make_services()
    heard: list[str] = []
    await asyncio.sleep(0)
    services.on_room(lambda: heard.append("gate"))
    services.make_room()
    services.make_room()
    assert heard == []
    await asyncio.sleep(0)
    assert heard == ["gate"]
    await services.close()


async def test_each_listener_hears_of_a_change_of_the_pool() -> None:
    services = make_services()
    heard: list[str] = []
    services.on_pool_change(lambda: heard.append("probes"))
    services.on_pool_change(lambda: heard.append("another"))
    services.roster.update([Member("http://p:1", Role.PREFILL)])
    assert heard == ["probes", "another"]
    await services.close()


async def test_an_engine_that_still_loads_is_neither_up_nor_down() -> None:
    services = make_services()
    loading, ready = Member("http://p:3", Role.PREFILL, is_ready=False), Member("http://d:4", Role.DECODE)
    services.roster.update([loading, ready])
    assert engines_up(services) == {'{engine="http://d:4",role="decode"}'}
    services.roster.update([replace(loading, is_ready=True), ready])
    services.roster.update([loading, ready])
    assert engines_up(services) == {'{engine="http://d:4",role="decode"}', '{engine="http://p:3",role="prefill"}'}
    await services.close()


def engines_up(services: Services) -> set[str]:
    """The labels of each engine whose probe is told."""
    lines = services.metrics.render().decode().splitlines()
    name = "pdcluster_router_engine_up"
    return {line.rpartition(" ")[0].removeprefix(name) for line in lines if line.startswith(name + "{")}
