"""What the API server refuses changes nothing of what runs: it is asked before anything is done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fakes.api_server import Asked, Fault
from fakes.operator_rig import AT, IMAGE, Rig, made, pool, running_rig
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.core.manifests.pool import pool_of
from pdcluster_operator.core.manifests.workloads import design_workload, revision_for
from pdcluster_operator.errors import ApiUnavailable, Forbidden, Refused
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

pytestmark = pytest.mark.anyio

MISSPELLED = {"spec": {"containers": [{"name": "engine", "imag": "x"}]}}
ROUTERS = {"spec": {"router": {"resources": {"limits": {"memory": "1Gi"}}}}}
ANNOTATED = {"example.com/from": "later"}
NO_SURGE = {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 1}}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig() as one:
        yield one


def is_misspelled(asked: Asked) -> bool:
    """A real API server refuses it so, whether it is to be stored or not (``fieldValidation=Strict``)."""
    return asked.method != "GET" and "'imag'" in str(asked.body) and "pdclusters" not in asked.path


def refuses(rig: Rig, status: int = 400) -> None:
    rig.api.faults.append(Fault(is_misspelled, status, times=99))


def merge(rig: Rig, *patches: dict[str, Any]) -> None:
    for patch in patches:
        rig.store.merge(AT, patch)


def overrides(role: str, content: object) -> dict[str, Any]:
    return {"spec": {"roles": {role: {"podOverrides": content}}}}


def children(rig: Rig) -> dict[tuple[str, str, str], str]:
    """All that the operator has made, and in which state it is."""
    kinds = ("pdclusters", "events", "pods")
    return {at: one.body["metadata"]["resourceVersion"] for at, one in rig.store.objects.items() if at[0] not in kinds}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("limits", [{}, NO_SURGE], ids=["with a surge", "without"])
@pytest.mark.parametrize(("status", "error"), [(400, Refused), (403, Forbidden)])
async def test_an_engine_that_the_api_server_refuses_leaves_what_runs_as_it_is(
    rig: Rig, role: str, limits: dict[str, object], status: int, error: type[Exception]
) -> None:
    await made(rig, **limits)
    before = children(rig)
    refuses(rig, status)
    merge(rig, overrides(role, MISSPELLED), ROUTERS)
    for _ in range(3):
        with pytest.raises(error):
            await rig.look()
    assert children(rig) == before
    assert "a fault of the test" in rig.condition("Accepted")["message"]


async def test_engines_that_are_lost_are_told_also_while_the_api_server_takes_no_child(rig: Rig) -> None:
    """As with an admission webhook that is down: it fails dry runs, too."""
    await made(rig)
    before = rig.store.read(AT)["status"]
    for pod in rig.store.all_of("pods"):
        rig.store.delete(("pods", "default", pod["metadata"]["name"]))
    rig.api.faults.append(Fault(lambda asked: asked.is_write and "/pdclusters/" not in asked.path, 500, times=99))
    rig.store.merge(AT, {"spec": {"image": "engine:2"}})
    with pytest.raises(ApiUnavailable):
        await rig.look()
    assert rig.condition("Ready")["status"] == "False"
    assert rig.condition("Progressing")["reason"] == "RolloutComplete"
    assert rig.store.read(AT)["status"]["target"] == before["target"]


async def test_the_next_leader_leaves_it_as_it_is_too(rig: Rig) -> None:
    await made(rig, **NO_SURGE)
    before = children(rig)
    refuses(rig)
    merge(rig, overrides("decode", MISSPELLED), ROUTERS)
    with pytest.raises(Refused):
        await Rig(rig.api, rig.router, rig.sessions, None).look()
    assert children(rig) == before


async def test_routers_that_the_api_server_refuses_keep_the_engines_and_their_service_as_they_are(rig: Rig) -> None:
    await made(rig)
    before = children(rig)
    refuses(rig)
    router = {"podOverrides": MISSPELLED, "service": {"annotations": {"a": "b"}}}
    merge(rig, {"spec": {"image": "engine:2", "router": router}})
    with pytest.raises(Refused):
        await rig.look()
    assert children(rig) == before


async def test_a_stranger_in_the_place_of_the_next_engines_is_found_before_the_old_ones_go(rig: Rig) -> None:
    await made(rig, **NO_SURGE)
    before = children(rig)
    merge(rig, overrides("decode", {"metadata": {"annotations": {"a": "b"}}}))
    stranger = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {}, "spec": {"replicas": 0}}
    rig.store.create(("deployments", "default", next_decode(rig)), stranger)
    with pytest.raises(Refused, match="has no owner"):
        await rig.look()
    assert before.items() <= children(rig).items()


def next_decode(rig: Rig) -> str:
    """The name of the workload that the spec asks for."""
    found = pool_of(PDCluster.from_wire(rig.store.read(AT)), IMAGE)
    return design_workload(found, Role.DECODE, revision_for(found)).name


async def test_of_a_new_pool_that_is_refused_nothing_is_made(rig: Rig) -> None:
    refuses(rig)
    rig.store.create(AT, pool(rig.router, {"spec.roles.decode.podOverrides": MISSPELLED}))
    with pytest.raises(Refused):
        await rig.look()
    assert children(rig) == {}


async def test_when_it_is_mended_it_is_carried_out(rig: Rig) -> None:
    await made(rig)
    refuses(rig)
    merge(rig, overrides("decode", MISSPELLED))
    with pytest.raises(Refused):
        await rig.look()
    mended = {"spec": {"containers": [{"name": "engine", "imag": None, "image": "x"}]}}
    merge(rig, overrides("decode", mended))
    await rig.look_until_still()
    assert rig.condition("Ready")["status"] == "True"


async def test_a_workload_whose_turn_comes_late_is_asked_once(rig: Rig) -> None:
    await made(rig, **NO_SURGE)
    merge(rig, {"spec": {"image": "engine:2", "rollout": {"paused": True}}})
    for _ in range(3):
        await rig.look()
    asked = [one for one in rig.api.asked if one.is_dry and "engine:2" in str(one.body)]
    assert len(asked) == 2, "one of each role"
    assert "engine:2" not in str(rig.store.all_of("deployments"))


async def test_before_an_engine_goes_for_a_workload_it_is_asked_for_anew(rig: Rig) -> None:
    """What the API server would have created a while ago a new policy may forbid."""
    await made(rig, **NO_SURGE)
    merge(rig, {"spec": {"rollout": {"paused": True}}}, overrides("decode", {"metadata": {"annotations": ANNOTATED}}))
    await rig.look()
    assert "later" not in str(rig.store.all_of("deployments"))
    before = children(rig)
    rig.api.faults.append(Fault(lambda asked: asked.is_dry and "later" in str(asked.body), 403, times=99))
    merge(rig, {"spec": {"rollout": {"paused": False}}})
    with pytest.raises(Forbidden):
        await rig.look()
    assert children(rig) == before


async def test_engines_that_somebody_changed_by_hand_are_set_back_and_the_routers_change_as_asked(rig: Rig) -> None:
    await made(rig)
    [decode] = [one for one in engines(rig) if one["metadata"]["labels"][labels.ROLE] == "decode"]
    at = ("deployments", "default", decode["metadata"]["name"])
    by_hand = {"spec": {"template": {"spec": {"containers": [{"name": "engine", "image": "by hand"}]}}}}
    rig.store.merge(at, by_hand, "kubectl-set|Update|")
    merge(rig, ROUTERS)
    await rig.look_until_still()
    assert rig.store.read(at)["spec"]["template"] == decode["spec"]["template"]
    assert rig.condition("Ready")["status"] == "True"
    assert rig.events().count("Warning TakenBack") == 1


@pytest.mark.parametrize("content", [{"metadata": "x"}, {"metadata": {"labels": ["x"]}}, {"spec": 1}])
@pytest.mark.parametrize("part", ["prefill", "router"])
async def test_overrides_of_any_shape_are_told_and_change_nothing(rig: Rig, part: str, content: object) -> None:
    await made(rig)
    before = children(rig)
    of_router = {"spec": {"router": {"podOverrides": content}}}
    merge(rig, of_router if part == "router" else overrides(part, content))
    await rig.look()
    assert rig.condition("Accepted")["reason"] == "Refused"
    assert "give a map" in rig.condition("Accepted")["message"]
    assert children(rig) == before


async def test_a_stop_is_not_refused_for_engines_that_it_would_not_make(rig: Rig) -> None:
    """Accelerators that nobody wants any more come free, whatever the API server says of engines that are not made."""
    await made(rig)
    refuses(rig)
    stop = {"spec": {"roles": {role: {"replicas": 0} for role in ("prefill", "decode")}}}
    merge(rig, overrides("decode", MISSPELLED), stop)
    await rig.look_until_still()
    assert rig.condition("Accepted")["status"] == "True"
    assert {one["spec"]["replicas"] for one in engines(rig)} <= {0}


def engines(rig: Rig) -> list[dict[str, Any]]:
    return [one for one in rig.store.all_of("deployments") if "pdcluster.dev/role" in one["metadata"]["labels"]]
