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


# Routers that speak otherwise: TLS comes, or goes.

READY: Final = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
NOT_PLACED: Final = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]}
ENDED: Final = {"exitCode": 2, "reason": "Error", "message": "the key is Ed25519"}
DYING: Final = {
    "containerStatuses": [{"name": "router", "restartCount": 3, "state": {}, "lastState": {"terminated": ENDED}}]
}
CLEAR: Final = ("picker", "kubernetes.io/h2c")
OVER_TLS: Final = ("picker-tls", "http2")
WITH_TLS: Final[Mapping[str, Any]] = {**GATEWAYS, "tls": {"secretName": "picker"}}
EACH_WAY: Final = pytest.mark.parametrize(
    ("before", "after", "first", "last", "spoken"),
    [
        (GATEWAYS, {"tls": {"secretName": "picker"}}, CLEAR, OVER_TLS, "in the clear"),
        (WITH_TLS, {"tls": None}, OVER_TLS, CLEAR, "by TLS"),
    ],
    ids=["TLS comes", "TLS goes"],
)


def target_of(rig: Rig) -> tuple[str, str]:
    """The routers' port to which gateways are led, and how they are to speak."""
    (_, port) = rig.store.objects["services", "default", "pool-router-internal"].body["spec"]["ports"]
    return port["targetPort"], port["appProtocol"]


def make_router(rig: Rig, name: str, status: Mapping[str, Any] = READY) -> None:
    """A pod of the routers' Deployment as it is now."""
    template = rig.store.read(("deployments", "default", "pool-router"))["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": template["metadata"]["labels"]}}
    rig.store.create(("pods", "default", name), {**pod, "spec": template["spec"], "status": dict(status)})


async def change_of(rig: Rig, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """A pool with two old routers, whose field is changed then."""
    rig.store.create(SECRET_AT, PAIR)
    await made(rig, **{"spec.router.picker": dict(before)})
    make_router(rig, "old-0")
    make_router(rig, "old-1")
    await rig.look_until_still()
    rig.store.merge(AT, {"spec": {"router": {"picker": dict(after)}}})
    await rig.look_until_still()


def held(spoken: str) -> str:
    return f"until a new router is ready, the Service pool-router-internal leads gateways to the old ones, {spoken}"


@EACH_WAY
async def test_gateways_are_led_to_the_old_routers_until_a_new_one_is_ready(
    rig: Rig, before: Any, after: Any, first: tuple[str, str], last: tuple[str, str], spoken: str
) -> None:
    await change_of(rig, before, after)
    assert target_of(rig) == first
    assert rig.condition("RouterReady")["message"] == f"2 of 2 routers are ready; {held(spoken)}"
    make_router(rig, "new-0")
    await rig.look()
    assert target_of(rig) == last
    for name in ("old-0", "old-1"):
        rig.store.delete(("pods", "default", name))
    await rig.look_until_still()
    assert target_of(rig) == last
    assert rig.condition("RouterReady")["message"] == "2 of 2 routers are ready"


@EACH_WAY
@pytest.mark.parametrize(
    ("status", "told"),
    [
        (NOT_PLACED, "pod new-0 is not placed: 0/3 nodes are available"),
        (DYING, "pod new-0, container router died 3 times, the last time Error (exit code 2): the key is Ed25519"),
    ],
    ids=["no place", "a crash loop"],
)
async def test_a_new_router_that_does_not_come_up_takes_no_gateway_away(
    rig: Rig,
    before: Any,
    after: Any,
    first: tuple[str, str],
    last: tuple[str, str],
    spoken: str,
    status: dict[str, Any],
    told: str,
) -> None:
    await change_of(rig, before, after)
    make_router(rig, "new-0", status)
    await rig.look_until_still()
    assert target_of(rig) == first
    assert rig.condition("RouterReady")["message"] == f"2 of 2 routers are ready: {told}; {held(spoken)}"
    rig.store.merge(("pods", "default", "new-0"), {"status": {**READY, "containerStatuses": None}})
    await rig.look_until_still()
    assert target_of(rig) == last


@EACH_WAY
async def test_a_service_that_is_held_back_is_made_anew_and_set_back_as_any(
    rig: Rig, before: Any, after: Any, first: tuple[str, str], last: tuple[str, str], spoken: str
) -> None:
    at = ("services", "default", "pool-router-internal")
    await change_of(rig, before, after)
    rig.store.delete(at)
    await rig.look_until_still()
    assert target_of(rig) == first
    wanted = dict(rig.store.read(at)["metadata"]["labels"])
    rig.store.merge(at, {"metadata": {"labels": dict.fromkeys(wanted, "x")}})
    internal, gateways = rig.store.read(at)["spec"]["ports"]
    rig.store.merge(at, {"spec": {"ports": [internal, {**gateways, "targetPort": "http", "appProtocol": "x"}]}})
    await rig.look_until_still()
    assert target_of(rig) == first
    assert rig.store.read(at)["metadata"]["labels"] == wanted


async def test_a_field_that_goes_takes_its_port_along_also_while_new_routers_do_not_come_up(rig: Rig) -> None:
    await change_of(rig, GATEWAYS, {"tls": {"secretName": "picker"}})
    rig.store.merge(AT, {"spec": {"router": {"picker": None}}})
    await rig.look_until_still()
    assert ports_of(rig) == {"internal": 8001}


async def test_a_new_pool_has_its_service_also_without_the_secret(rig: Rig) -> None:
    await made(rig, **{"spec.router.picker": WITH_TLS})
    assert "no Secret default/picker" in rig.condition("RouterReady")["message"]
    assert target_of(rig) == OVER_TLS


async def test_a_secret_that_is_missing_takes_no_gateway_away(rig: Rig) -> None:
    await change_of(rig, GATEWAYS, {"tls": {"secretName": "another"}})
    told = rig.condition("RouterReady")["message"]
    assert "there is no Secret default/another" in told
    assert told.endswith(held("in the clear"))
    assert target_of(rig) == CLEAR
    rig.store.create(("secrets", "default", "another"), PAIR)
    await rig.look_until_still()
    assert target_of(rig) == CLEAR, "no router has it yet"
    make_router(rig, "new-0")
    await rig.look()
    assert target_of(rig) == OVER_TLS


async def test_the_port_comes_and_goes_with_the_field(rig: Rig) -> None:
    await made(rig)
    assert ports_of(rig) == {"internal": 8001}
    rig.store.merge(AT, {"spec": {"router": {"picker": dict(GATEWAYS)}}})
    await rig.look_until_still()
    assert ports_of(rig) == {"internal": 8001, "picker": 9002}
    rig.store.merge(AT, {"spec": {"router": {"picker": None}}})
    await rig.look_until_still()
    assert ports_of(rig) == {"internal": 8001}
