"""A pool is stopped, what fails fails, and it is started again: no look says Verified before a new request.

The laws behind it, over any failures in any order, are in ``tests/property/test_operator_proof.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest

from fakes.api_server import Asked, Fault
from fakes.operator_rig import AT, KEY, Rig, made, pool, running_rig, settle, verifying
from pdcluster_operator.errors import ApiUnavailable, Forbidden, KubeError

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def proven_pool() -> AsyncIterator[Rig]:
    async with running_rig() as rig:
        await made(rig)
        # Whatever the clients' Service is: it does not lead to the port where orders are taken.
        assert rig.router.hosts == ["pool-router-internal.default.svc:8001"]
        yield rig


@asynccontextmanager
async def next_operator(rig: Rig) -> AsyncIterator[Rig]:
    """It knows only what is in the cluster."""
    other = Rig(rig.api, rig.router, rig.sessions, None)
    async with verifying(other):
        yield other


def resize(rig: Rig, replicas: int) -> None:
    """The user asks for so many of each role."""
    rig.store.merge(AT, {"spec": {"roles": {role: {"replicas": replicas} for role in ("prefill", "decode")}}})


def is_status(asked: Asked) -> bool:
    return asked.is_write and asked.path.endswith("/pdclusters/pool/status")


def is_move(asked: Asked) -> bool:
    return asked.is_write and "/deployments/pool-prefill-" in asked.path


async def stop_without_a_word(rig: Rig, status: int) -> None:
    """One look at a pool that shall stop: engines are told to go, and status is not written."""
    resize(rig, 0)
    rig.api.faults.append(Fault(is_status, status, times=99))
    with pytest.raises(KubeError):
        await rig.look()
    settle(rig.store)
    rig.api.faults.clear()
    assert 0 in rig.deployments().values()
    assert rig.store.read(AT)["status"]["verifiedTarget"], "else there is nothing to fall"


async def start_is_proven_anew(rig: Rig) -> None:
    resize(rig, 1)
    for _ in range(2):  # The proof falls, then engines come.
        await rig.look()
        assert rig.condition("TransferVerified")["reason"] == "VerificationPending"
        assert len(rig.router.orders) == 1
    await rig.look_until_still()
    assert len(rig.router.orders) == 2
    assert rig.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("is_killed", [False, True], ids=["the same operator", "the next one"])
@pytest.mark.parametrize("status", [409, 500])
async def test_a_stop_whose_status_was_never_written_leaves_no_proof_to_a_start(status: int, is_killed: bool) -> None:
    async with proven_pool() as rig:
        await stop_without_a_word(rig, status)
        async with next_operator(rig) if is_killed else nullcontext(rig) as later:
            await start_is_proven_anew(later)


async def test_a_stop_that_is_refused_half_way_leaves_no_proof_to_a_start() -> None:
    async with proven_pool() as rig:
        await stop_without_a_word(rig, 500)
        assert sorted(rig.deployments().values()) == [0, 1], "the last prefill engine goes last"
        rig.api.faults.append(Fault(is_move, 403))
        with pytest.raises(Forbidden):
            await rig.look()
        assert rig.condition("Accepted")["reason"] == "Refused"
        assert rig.store.read(AT)["status"]["verifiedTarget"] == "", "said, for somebody else may own the field too"
        await start_is_proven_anew(rig)


async def test_no_engine_comes_while_the_status_that_proves_those_before_it_cannot_be_written() -> None:
    async with proven_pool() as rig:
        await stop_without_a_word(rig, 500)
        resize(rig, 1)
        rig.api.faults.append(Fault(is_status, 500, times=99))
        for _ in range(2):
            with pytest.raises(ApiUnavailable):
                await rig.look()
        assert 0 in rig.deployments().values()
        rig.api.faults.clear()
        await start_is_proven_anew(rig)


async def test_a_stop_goes_on_although_its_status_cannot_be_written() -> None:
    async with proven_pool() as rig:
        await stop_without_a_word(rig, 500)
        rig.api.faults.append(Fault(is_status, 500, times=99))
        with pytest.raises(ApiUnavailable):
            await rig.look()
        assert list(rig.deployments().values()) == [0, 0]


async def test_a_pool_that_is_deleted_and_made_again_is_proven_anew() -> None:
    async with proven_pool() as rig:
        for at in list(rig.store.objects):
            rig.store.delete(at)
        await rig.look()
        assert rig.verifier.results(KEY) == {}
        rig.store.create(AT, pool(rig.router))
        await rig.look_until_still()
        assert len(rig.router.orders) == 2


async def test_after_the_proof_fell_it_looks_again_at_once() -> None:
    async with proven_pool() as rig:
        await stop_without_a_word(rig, 500)
        resize(rig, 1)
        assert await rig.look() == 0


async def test_a_proof_that_somebody_else_has_written_too_falls_all_the_same() -> None:
    """A backup's restore owns the field from then on: left out of an apply it would stay, and no engine would come."""
    async with proven_pool() as rig:
        proven = rig.store.read(AT)
        restored = {
            "metadata": {"uid": proven["metadata"]["uid"]},
            "status": {"verifiedTarget": proven["status"]["verifiedTarget"]},
        }
        rig.store.apply(AT, restored, "backup|Apply|status", force=True)
        await stop_without_a_word(rig, 500)
        await start_is_proven_anew(rig)
