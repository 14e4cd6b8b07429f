"""Looks at a PDCluster that gateways ask: its Secret is looked for, and what the field adds comes and goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import pytest

from fakes.operator_rig import AT, Rig, made, pool, running_rig

pytestmark = pytest.mark.anyio

SECRET_AT: Final = ("secrets", "default", "picker")
GATEWAYS: Final[Mapping[str, Any]] = {"gatewayNamespaces": ["gateways"]}
MUTUAL: Final[Mapping[str, Any]] = {**GATEWAYS, "tls": {"secretName": "picker", "clientCertificates": True}}

PAIR: Final[dict[str, Any]] = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {},
    "data": {"tls.crt": "eA==", "tls.key": "eA=="},
}
"""A Secret with a pair, and no authority."""


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig() as one:
        yield one


def ports_of(rig: Rig) -> dict[str, int]:
    ports = rig.store.objects["services", "default", "pool-router-internal"].body["spec"]["ports"]
    return {port["name"]: port["port"] for port in ports}


async def test_a_secret_for_gateways_that_is_not_whole_is_told_until_it_is(rig: Rig) -> None:
    rig.store.create(AT, pool(rig.router, {"spec.router.picker": MUTUAL}))
    await rig.look_until_still()
    assert rig.condition("RouterReady")["message"].endswith(
        "there is no Secret default/picker, and routers cannot start without it: make it, or leave router.picker.tls "
        "out"
    )
    rig.store.create(SECRET_AT, PAIR)
    await rig.look()
    told = rig.condition("RouterReady")["message"]
    assert "has no key ca.crt" in told
    assert told.endswith("make it, or leave router.picker.tls.clientCertificates out")
    rig.store.merge(SECRET_AT, {"data": {"ca.crt": "eA=="}})
    await rig.look()
    assert rig.condition("Ready")["status"] == "True"


async def test_gateways_are_led_to_routers_with_tls_only_once_these_can_start(rig: Rig) -> None:
    await made(rig, **{"spec.router.picker": GATEWAYS})
    assert target_of(rig) == ("picker", "kubernetes.io/h2c")
    rig.store.merge(AT, {"spec": {"router": {"picker": {"tls": {"secretName": "picker"}}}}})
    await rig.look_until_still()
    assert "no Secret default/picker" in rig.condition("RouterReady")["message"]
    assert target_of(rig) == ("picker", "kubernetes.io/h2c")
    rig.store.create(SECRET_AT, PAIR)
    await rig.look_until_still()
    assert target_of(rig) == ("picker-tls", "http2")


def target_of(rig: Rig) -> tuple[str, str]:
    """The routers' port to which gateways are led, and how they are to speak."""
    (_, port) = rig.store.objects["services", "default", "pool-router-internal"].body["spec"]["ports"]
    return port["targetPort"], port["appProtocol"]


async def test_the_port_comes_and_goes_with_the_field(rig: Rig) -> None:
    await made(rig)
    assert ports_of(rig) == {"internal": 8001}
    rig.store.merge(AT, {"spec": {"router": {"picker": dict(GATEWAYS)}}})
    await rig.look_until_still()
    assert ports_of(rig) == {"internal": 8001, "picker": 9002}
    rig.store.merge(AT, {"spec": {"router": {"picker": None}}})
    await rig.look_until_still()
    assert ports_of(rig) == {"internal": 8001}
