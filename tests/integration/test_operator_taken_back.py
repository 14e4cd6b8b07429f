"""Somebody sets a field of a child of ours: it is set back and told, and nothing else waits for that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fakes.api_server import Asked, Fault
from fakes.operator_rig import AT, KEY, Rig, made, pool, running_rig
from pdcluster_operator.errors import Contested, Refused, Taken
from pdcluster_operator.kinds import DEPLOYMENT

pytestmark = pytest.mark.anyio


SCALED = {"spec": {"replicas": 5}}
ROUTERS = ("deployments", "default", "pool-router")
SERVICE = ("services", "default", "pool-router")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig() as one:
        yield one


@pytest.mark.parametrize(
    ("at", "patch"),
    [
        (("services", "default", "pool-router"), {"spec": {"type": "NodePort"}}),
        (ROUTERS, SCALED),
        (("networkpolicies", "default", "pool-decode"), {"spec": {"policyTypes": ["Egress"]}}),
    ],
    ids=lambda it: it[0] if isinstance(it, tuple) else "",
)
async def test_a_field_of_ours_that_somebody_else_took_is_taken_back_and_one_event_says_what_and_from_whom(
    rig: Rig, at: tuple[str, str, str], patch: dict[str, Any]
) -> None:
    await made(rig)
    [field] = patch["spec"]
    before = rig.store.read(at)["spec"]
    rig.store.merge(at, patch, "kubectl-edit|Update|")
    await rig.look_until_still()
    assert rig.store.read(at)["spec"] == before
    assert rig.condition("Accepted")["status"] == "True"
    [told] = [one["message"] for one in rig.store.all_of("events") if one["reason"] == "TakenBack"]
    for word in (at[2], f".spec.{field}", "kubectl-edit"):
        assert word in told


async def test_while_somebody_scales_the_routers_the_engines_scale_too(rig: Rig) -> None:
    await made(rig)
    rig.store.merge(ROUTERS, SCALED, "kubectl|Update|scale")
    rig.store.merge(AT, {"spec": {"roles": {"decode": {"replicas": 2}}}})
    await rig.look_until_still()
    assert sorted(rig.deployments().values()) == [1, 2]
    assert rig.store.read(ROUTERS)["spec"]["replicas"] == 2


async def test_who_takes_a_field_again_and_again_is_told_of_once_and_met_at_the_pace_of_failures(rig: Rig) -> None:
    await made(rig)
    rig.store.merge(ROUTERS, SCALED, "hpa|Update|scale")
    await rig.look()
    for _ in range(3):
        rig.store.merge(ROUTERS, SCALED, "hpa|Update|scale")
        with pytest.raises(Contested, match="hpa"):
            await rig.look()
        assert rig.store.read(ROUTERS)["spec"]["replicas"] == 2
    await rig.look()
    assert rig.events().count("Warning TakenBack") == 1


async def test_an_object_that_the_watch_did_not_show_yet_is_taken_back_only_if_it_is_ours(rig: Rig) -> None:
    await made(rig)
    rig.store.merge(ROUTERS, SCALED, "kubectl|Update|scale")
    blind = Rig(rig.api, rig.router, rig.sessions, None)
    blind.sync()
    [seen] = [one for one in blind.caches.of_kind(DEPLOYMENT) if one.ref.name == "pool-router"]
    blind.caches.drop(seen.ref, seen.uid)
    await blind.reconciler.reconcile(KEY)
    assert rig.store.read(ROUTERS)["spec"]["replicas"] == 2
    rig.store.merge(ROUTERS, {"metadata": {"ownerReferences": None}, **SCALED})
    blind.caches.drop(seen.ref, seen.uid)
    with pytest.raises(Refused, match="has no owner"):
        await blind.reconciler.reconcile(KEY)
    assert rig.store.read(ROUTERS)["spec"]["replicas"] == 5


async def test_what_somebody_makes_between_our_look_and_our_apply_is_never_taken(rig: Rig) -> None:
    """An apply without a uid is good for whatever has the name, so it is not forced."""
    rig.store.create(AT, pool(rig.router))
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {}, "spec": {"type": "NodePort"}}

    def make_theirs_first(asked: Asked) -> bool:
        if asked.is_write and asked.path.endswith("/services/pool-router") and SERVICE not in rig.store.objects:
            rig.store.create(SERVICE, theirs, "kubectl|Update|")
        return False

    rig.api.faults.append(Fault(make_theirs_first, 500))
    with pytest.raises(Taken):
        await rig.look()
    assert rig.store.read(SERVICE)["spec"] == {"type": "NodePort"}
    assert rig.condition("Accepted")["reason"] == "Refused"
