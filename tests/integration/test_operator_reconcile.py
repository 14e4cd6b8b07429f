"""Looks at one PDCluster on an API server: what is made, what is left alone, who is told."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fakes.api_server import Fault
from fakes.operator_rig import AT, KEY, Rig, made, pool, running_rig, settle
from pdcluster_operator.errors import ApiUnavailable, Conflict, Forbidden, Refused
from pdcluster_operator.kinds import NETWORK_POLICY, SERVICE, Kind
from pdcluster_protocol import labels

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig() as one:
        yield one


async def test_a_new_pdcluster_gets_its_children_and_becomes_ready(rig: Rig) -> None:
    await made(rig)
    kinds = sorted({at[0] for at in rig.store.objects} - {"pdclusters", "events", "pods"})
    assert kinds == [
        "deployments",
        "networkpolicies",
        "poddisruptionbudgets",
        "rolebindings",
        "roles",
        "secrets",
        "serviceaccounts",
        "services",
    ]
    assert list(rig.deployments().values()) == [1, 1]
    assert rig.condition("Ready")["status"] == "True"
    assert rig.condition("TransferVerified")["reason"] == "Verified"
    assert len(rig.router.orders) == 1
    assert "Normal Serving" in rig.events()


@pytest.mark.parametrize("mode", ["Fixed", "External"])
async def test_a_second_look_makes_no_call_at_all(rig: Rig, mode: str) -> None:
    await made(rig, **{"spec.scaling.mode": mode})
    assert len(rig.store.all_of("pdrolescalers")) == 2 * (mode == "External")
    rig.api.asked.clear()
    wake = await rig.look()
    assert rig.api.asked == []
    assert wake is not None
    assert 540 <= wake <= 660


async def test_another_operator_finds_nothing_to_change(rig: Rig) -> None:
    """Nothing lives in the first one's memory: what it knew is in the cluster."""
    await made(rig)
    before = rig.store.num_writes
    other = Rig(rig.api, rig.router, rig.sessions, None)
    other.sync()
    await other.reconciler.reconcile(KEY)
    assert rig.store.num_writes == before
    assert len(rig.router.orders) == 1
    rig.api.asked.clear()
    await other.look()
    assert rig.api.asked == []


async def test_what_somebody_deleted_is_made_again(rig: Rig) -> None:
    await made(rig)
    rig.store.delete(("services", "default", "pool-router"))
    await rig.look_until_still()
    assert ("services", "default", "pool-router") in rig.store.objects


NEWER = {"spec": {"transfer": {"rails": 4}, "roles": {"decode": {"device": {"topology": "Tight"}}}}}
"""Fields that a newer CRD has, with defaults: every object gets them as soon as that CRD is there."""


async def test_an_object_with_fields_of_a_newer_crd_keeps_its_pool_and_the_fields_are_named_once(rig: Rig) -> None:
    await made(rig)
    before = rig.deployments()
    rig.store.merge(AT, NEWER)
    await rig.look_until_still()
    assert rig.deployments() == before
    assert rig.condition("Ready")["status"] == "True"
    told = rig.condition("Accepted")
    assert (told["status"], told["reason"]) == ("True", "UnknownFields")
    for name in ("spec.transfer.rails", "spec.roles.decode.device.topology"):
        assert name in told["message"]
    rig.store.merge(AT, {"spec": {"roles": {"decode": {"replicas": 2}}}})
    await rig.look_until_still()
    assert sorted(rig.deployments().values()) == [1, 2]
    assert rig.events().count("Warning UnknownFields") == 1


def without_newer(body: dict[str, Any]) -> dict[str, Any]:
    """As a watch shows it that was open when the CRD changed."""
    if body["kind"] != "PDCluster":
        return body
    old = copy.deepcopy(body)
    old["spec"]["transfer"].pop("rails", None)
    old["spec"]["roles"]["decode"]["device"].pop("topology", None)
    return old


async def test_a_watch_that_shows_the_old_crds_fields_makes_the_condition_neither_come_nor_go(rig: Rig) -> None:
    await made(rig)
    rig.watched = without_newer
    rig.store.merge(AT, NEWER)
    rig.store.merge(AT, {"spec": {"roles": {"decode": {"replicas": 2}}}})
    await rig.look_until_still()
    assert sorted(rig.deployments().values()) == [1, 2]
    await rig.look_until_still()
    assert rig.condition("Accepted")["reason"] == "UnknownFields"
    assert rig.events().count("Warning UnknownFields") == 1


async def test_a_value_that_nobody_understands_is_refused_whatever_else_is_unknown(rig: Rig) -> None:
    await made(rig)
    before = rig.deployments()
    rig.store.merge(AT, NEWER)
    rig.store.merge(AT, {"spec": {"transfer": {"protocol": "pigeon"}}})
    await rig.look()
    assert rig.condition("Accepted")["reason"] == "Refused"
    assert "transfer.protocol" in rig.condition("Accepted")["message"]
    assert rig.deployments() == before


@pytest.mark.parametrize(("kind", "name"), [(SERVICE, "pool-router"), (NETWORK_POLICY, "pool-decode")])
async def test_a_strangers_object_in_our_place_is_refused_and_left_alone(rig: Rig, kind: Kind, name: str) -> None:
    at = (kind.plural, "default", name)
    theirs = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {}, "spec": {"theirs": True}}
    rig.store.create(at, theirs)
    rig.store.create(AT, pool(rig.router))
    with pytest.raises(Refused, match="has no owner: delete it"):
        await rig.look()
    assert rig.store.read(at)["spec"] == theirs["spec"]
    assert f"{name} is there" in rig.condition("Accepted")["message"]


async def test_a_strangers_service_in_the_routers_place_is_found_before_anything_is_made(rig: Rig) -> None:
    at = ("services", "default", "pool-router")
    rig.store.create(at, {"apiVersion": "v1", "kind": "Service", "metadata": {}, "spec": {"selector": {"app": "x"}}})
    rig.store.create(AT, pool(rig.router))
    with pytest.raises(Refused, match="has no owner: delete it"):
        await rig.look()
    assert {one for one in rig.store.objects if one[0] != "events"} == {AT, at}


async def test_children_of_an_earlier_pdcluster_of_this_name_are_waited_for(rig: Rig) -> None:
    await made(rig)
    rig.store.delete(AT)
    rig.store.create(AT, pool(rig.router))
    with pytest.raises(Conflict, match="earlier PDCluster pool"):
        await rig.look()
    for at in [at for at in rig.store.objects if at[0] not in ("pdclusters", "events")]:
        rig.store.delete(at)  # As the garbage collector does.
    await rig.look_until_still()
    assert rig.condition("Ready")["status"] == "True"


async def test_a_child_that_the_api_server_does_not_take_is_told_in_its_words(rig: Rig) -> None:
    rig.store.create(AT, pool(rig.router))
    rig.api.faults.append(Fault(lambda asked: asked.is_write and "deployments" in asked.path, 422, times=99))
    with pytest.raises(Refused):
        await rig.look()
    assert "a fault of the test" in rig.condition("Accepted")["message"]
    rig.api.faults.clear()
    await rig.look_until_still()
    assert rig.condition("Accepted")["status"] == "True"


async def test_a_right_that_lacks_is_told(rig: Rig) -> None:
    rig.store.create(AT, pool(rig.router))
    rig.api.faults.append(Fault(lambda asked: "networkpolicies" in asked.path, 403, times=99))
    with pytest.raises(Forbidden):
        await rig.look()
    assert "403" in rig.condition("Accepted")["message"]


async def test_a_right_to_read_secrets_that_lacks_is_told(rig: Rig) -> None:
    rig.store.create(AT, pool(rig.router))
    rig.api.faults.append(Fault(lambda asked: "/secrets/" in asked.path and not asked.is_write, 403, times=99))
    with pytest.raises(Forbidden):
        await rig.look()
    assert "/secrets/pool-secret: 403" in rig.condition("Accepted")["message"]
    assert rig.deployments() == {}


async def test_an_event_that_may_not_be_sent_costs_no_look(rig: Rig) -> None:
    """What it tells is in status too."""
    rig.api.faults.append(Fault(lambda asked: asked.is_write and asked.path.endswith("/events"), 403, times=99))
    await made(rig)
    assert rig.condition("Ready")["status"] == "True"
    assert rig.api.faults[0].times < 99, "else none was sent"
    assert rig.events() == []


async def test_a_server_that_is_away_for_a_moment_is_asked_again_and_for_longer_is_reported(rig: Rig) -> None:
    rig.store.create(AT, pool(rig.router))
    rig.api.faults.append(Fault(lambda asked: asked.is_write, 503, times=2))
    await rig.look()
    rig.api.faults.append(Fault(lambda asked: asked.is_write, 500, times=99))
    rig.store.merge(AT, {"spec": {"router": {"replicas": 3}}})
    with pytest.raises(ApiUnavailable):
        await rig.look()


async def test_a_new_engine_argument_rolls_one_role_and_removes_the_old_workload(rig: Rig) -> None:
    await made(rig)
    before = set(rig.deployments())
    rig.store.merge(AT, {"spec": {"roles": {"decode": {"engineArgs": {"max-num-seqs": "8"}}}}})
    await rig.look_until_still()
    after = set(rig.deployments())
    assert len(after) == 2
    assert len(before & after) == 1  # Prefill's is as it was.
    assert rig.condition("Ready")["status"] == "True"
    assert len(rig.router.orders) == 2


async def test_a_workload_is_deleted_in_the_state_in_which_it_was_seen_and_a_service_by_its_uid(rig: Rig) -> None:
    await made(rig)
    rig.store.merge(AT, {"spec": {"image": "engine:2"}})
    await rig.look_until_still()
    deletes = [one for one in rig.api.asked if one.method == "DELETE"]
    assert sorted((one.path.split("/")[-2], *sorted(one.body["preconditions"])) for one in deletes) == [
        ("deployments", "resourceVersion", "uid"),
        ("deployments", "resourceVersion", "uid"),
        ("services", "uid"),
        ("services", "uid"),
    ]


async def test_a_move_that_was_decided_on_an_old_picture_is_a_conflict(rig: Rig) -> None:
    await made(rig)
    rig.store.merge(AT, {"spec": {"roles": {"decode": {"replicas": 2}}}})
    rig.sync()
    [decode] = [name for name in rig.deployments() if "decode" in name]
    rig.store.merge(("deployments", "default", decode), {"metadata": {"annotations": {"a": "b"}}})
    with pytest.raises(Conflict):
        await rig.reconciler.reconcile(KEY)
    assert rig.deployments()[decode] == 1
    await rig.look_until_still()
    assert rig.deployments()[decode] == 2


async def test_a_move_is_known_before_a_watch_has_told_of_it(rig: Rig) -> None:
    await made(rig)
    rig.store.merge(AT, {"spec": {"roles": {"decode": {"replicas": 2}}}})
    await rig.look()
    rig.api.asked.clear()
    await rig.reconciler.reconcile(KEY)
    assert rig.api.writes == []


@pytest.mark.parametrize(("plural", "part"), [("deployments", "decode"), ("services", "router")])
async def test_an_apply_to_another_object_than_the_one_that_was_seen_is_a_conflict(
    rig: Rig, plural: str, part: str
) -> None:
    await made(rig)
    other = Rig(rig.api, rig.router, rig.sessions, None)  # It applies each child once.
    other.sync()
    at = next(at for at in rig.store.objects if at[0] == plural and at[2].startswith(f"pool-{part}"))
    theirs = {name: value for name, value in rig.store.read(at).items() if name != "metadata"}
    rig.store.delete(at)
    rig.store.create(at, {**theirs, "metadata": {}})
    with pytest.raises(Conflict):
        await other.reconciler.reconcile(KEY)
    assert "ownerReferences" not in rig.store.read(at)["metadata"]


async def test_an_apply_to_a_workload_that_has_changed_since_is_a_conflict(rig: Rig) -> None:
    await made(rig)
    other = Rig(rig.api, rig.router, rig.sessions, None)  # It applies each child once.
    other.sync()
    [decode] = [name for name in rig.deployments() if "decode" in name]
    rig.store.merge(("deployments", "default", decode), {"metadata": {"annotations": {"a": "b"}}})
    with pytest.raises(Conflict):
        await other.reconciler.reconcile(KEY)
    await other.look_until_still()


async def test_replicas_that_somebody_changed_by_hand_are_put_right(rig: Rig) -> None:
    await made(rig)
    [decode] = [name for name in rig.deployments() if "decode" in name]
    rig.store.merge(("deployments", "default", decode), {"spec": {"replicas": 5}}, "kubectl|Update|scale")
    await rig.look_until_still()
    assert rig.deployments()[decode] == 1


async def test_a_refused_transfer_is_told_and_proven_again_later() -> None:
    async with running_rig((409, "engine p1 and d1: KV was not pushed")) as rig:
        rig.store.create(AT, pool(rig.router))
        for _ in range(3):
            await rig.look()
            await rig.verified()
            settle(rig.store)
        assert rig.condition("TransferVerified")["message"] == "engine p1 and d1: KV was not pushed"
        assert rig.condition("Ready")["status"] == "False"
        wake = await rig.look()
        assert wake is not None
        assert wake < 5


async def test_the_next_leader_says_what_failed_before_it_until_it_has_asked() -> None:
    async with running_rig((409, "KV was not pushed")) as rig:
        rig.store.create(AT, pool(rig.router))
        while not rig.router.orders or rig.condition("TransferVerified")["reason"] == "VerificationPending":
            await rig.look()
            await rig.verified()
            settle(rig.store)
        before = rig.store.read(AT)["status"]
        await Rig(rig.api, rig.router, rig.sessions, None).look()  # Its verifier does not run yet.
        assert rig.store.read(AT)["status"] == before
        assert rig.condition("Degraded")["message"] == "KV was not pushed"


async def test_a_pool_that_was_stopped_and_started_again_is_proven_with_its_new_engines(rig: Rig) -> None:
    await made(rig)
    for replicas in (0, 1):
        rig.store.merge(AT, {"spec": {"roles": {role: {"replicas": replicas} for role in ("prefill", "decode")}}})
        await rig.look_until_still()
        assert rig.condition("Ready")["status"] == str(bool(replicas))
    assert len(rig.router.orders) == 2


async def test_the_order_names_the_pods_of_the_target_and_is_signed_with_the_pools_secret(rig: Rig) -> None:
    await made(rig)
    [order] = rig.router.orders
    pods = {one["metadata"]["name"] for one in rig.store.all_of("pods")}
    assert {*(order.prefill_pods or ()), *(order.decode_pods or ())} == pods
    revisions = {one["metadata"]["labels"][labels.REVISION] for one in rig.store.all_of("pods")}
    assert {order.revision} == revisions
    assert rig.router.passes[0].startswith("Bearer ")


async def test_a_pdcluster_that_is_being_deleted_is_left_to_the_garbage_collector(rig: Rig) -> None:
    await made(rig)
    rig.store.merge(AT, {"metadata": {"deletionTimestamp": "2026-01-02T00:00:00Z"}})
    rig.api.asked.clear()
    assert await rig.look() is None
    assert rig.api.writes == []


async def test_an_object_that_we_do_not_understand_is_told_so(rig: Rig) -> None:
    rig.store.create(AT, pool(rig.router, {"spec.router.service.type": "OfTheFuture"}))
    assert await rig.look() is None
    assert "spec.router.service.type" in rig.condition("Accepted")["message"]
    rig.api.asked.clear()
    assert await rig.look() is None
    assert rig.api.asked == []


async def test_a_secret_with_clients_keys_that_is_not_there_is_told_until_it_is(rig: Rig) -> None:
    rig.store.create(AT, pool(rig.router, {"spec.router.apiKeysSecretRef": {"name": "clients"}}))
    await rig.look_until_still()
    told = rig.condition("RouterReady")
    assert told["status"] == "False"
    assert "there is no Secret default/clients" in told["message"]
    assert rig.condition("Ready")["status"] == "False"
    assert await rig.look() == 10
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {"other": "eA=="}}
    rig.store.create(("secrets", "default", "clients"), secret)
    await rig.look()
    assert "has no key keys" in rig.condition("RouterReady")["message"]
    rig.store.merge(("secrets", "default", "clients"), {"data": {"keys": "eA=="}})
    await rig.look()
    assert rig.condition("Ready")["status"] == "True"


async def test_a_secret_with_a_certificate_that_is_not_whole_is_told_until_it_is(rig: Rig) -> None:
    rig.store.create(AT, pool(rig.router, {"spec.router.tls": {"secretName": "certificate"}}))
    await rig.look_until_still()
    assert rig.condition("RouterReady")["message"].endswith(
        "there is no Secret default/certificate, and routers cannot start without it: make it, or leave router.tls out"
    )
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {"tls.crt": "eA=="}}
    rig.store.create(("secrets", "default", "certificate"), secret)
    await rig.look()
    assert "has no key tls.key" in rig.condition("RouterReady")["message"]
    rig.store.merge(("secrets", "default", "certificate"), {"data": {"tls.key": "eA=="}})
    await rig.look()
    assert rig.condition("Ready")["status"] == "True"
