"""Two revisions behind one router: they are never paired, and a request may go on from one to the other."""

from __future__ import annotations

import pytest

from fakes.faults import Fault, Gate
from fakes.kube_rig import KubeRig, num_seen, running_kube_rig, serve
from fakes.router import orders, post, send, until

pytestmark = pytest.mark.anyio


def revisions_of_pairs(rig: KubeRig) -> set[tuple[str, str]]:
    """(decode's revision, prefill's) of every order that a prefill engine got."""
    decodes = {(seen.params or {})["transfer_id"]: engine for engine in rig.decodes for seen in engine.seen}
    return {
        (rig.listed[decodes[(seen.params or {})["transfer_id"]].url].revision, rig.listed[engine.url].revision)
        for engine in rig.prefills
        for seen in engine.seen
    }


async def two_revisions(rig: KubeRig) -> None:
    """Two pairs of r2 beside what is there."""
    await rig.usable(*[await rig.start(role, "r2") for role in ("prefill", "decode") for _ in range(2)])


async def test_two_revisions_are_never_paired() -> None:
    async with running_kube_rig(pairs=2) as rig:
        await two_revisions(rig)
        await serve(rig, 12)
        assert revisions_of_pairs(rig) == {("r1", "r1"), ("r2", "r2")}


@pytest.mark.parametrize("revision", ["r1", "r2"])
async def test_two_revisions_are_never_paired_in_retries_either(revision: str) -> None:
    async with running_kube_rig(pairs=2) as rig:
        await two_revisions(rig)
        for engine in rig.prefills:
            if rig.listed[engine.url].revision == revision:
                engine.fault = Fault.ERROR_500
        for decode in rig.decodes:
            decode.fault = Fault.RECOMPUTE
            decode.num_losses = 0
        await serve(rig, 8)
        assert revisions_of_pairs(rig) == {("r1", "r1"), ("r2", "r2")}
        failed = [seen for seen in orders(rig) if seen.fault is Fault.ERROR_500]
        assert {(seen.params or {})["attempt"] for seen in failed} == {1, 2}


async def test_a_decode_that_fails_may_be_replaced_by_one_of_another_revision_with_its_own_prefill() -> None:
    async with running_kube_rig() as rig:
        await rig.usable(*[await rig.start(role, "r2") for role in ("prefill", "decode")])
        rig.decodes[0].fault = Fault.DIE_WITH_KV
        await serve(rig, 4)
        assert rig.decodes[0].seen
        assert revisions_of_pairs(rig) == {("r1", "r1"), ("r2", "r2")}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_revision_with_one_role_only_gets_nothing(role: str) -> None:
    async with running_kube_rig() as rig:
        alone = await rig.start(role, "r2")
        await rig.usable(alone)
        await serve(rig, 4)
        assert alone.seen == []
        other = await rig.start("decode" if role == "prefill" else "prefill", "r2")
        await rig.usable(other)
        await serve(rig, 4)
        assert alone.seen
        assert other.seen


async def test_a_revision_that_loses_one_role_gets_nothing_new_and_its_requests_end() -> None:
    async with running_kube_rig() as rig:
        await rig.usable(*[await rig.start(role, "r2") for role in ("prefill", "decode")])
        old = rig.decodes[0]
        old.close_gate(Gate.RESERVE)
        clients = [await send(rig) for _ in range(2)]
        await until(lambda: len(old.seen) == 1)
        rig.terminate(rig.prefills[0])
        await rig.becomes(rig.prefills[0], "finishing")
        await serve(rig, 3)
        assert len(old.seen) == 1
        old.open_gate(Gate.RESERVE)
        assert [(await client.receive()).status for client in clients] == [200, 200]
        assert len(rig.prefills[0].seen) == 1, "the only engine of its revision that could still prefill it"
        assert revisions_of_pairs(rig) == {("r1", "r1"), ("r2", "r2")}


async def test_where_decode_shall_not_recompute_a_request_goes_to_the_revision_that_still_has_a_pair() -> None:
    async with running_kube_rig(on_prefill_failure="fail") as rig:
        old = rig.decode
        old.close_gate(Gate.RESERVE)
        client = await send(rig)
        await until(lambda: len(old.seen) == 1)
        await rig.usable(*[await rig.start(role, "r2") for role in ("prefill", "decode")])
        rig.unlist(rig.prefill)
        await rig.becomes(rig.prefill, "")
        old.open_gate(Gate.RESERVE)
        assert (await client.receive()).status == 200
        assert revisions_of_pairs(rig) == {("r2", "r2")}
        assert (old.seen[0].outcome or {})["status"] == "failed", "decode gives the blocks back that it had reserved"


async def test_a_revision_whose_prefill_engines_have_all_failed_a_request_is_not_asked_again() -> None:
    async with running_kube_rig(on_prefill_failure="fail") as rig:
        rig.prefill.fault = Fault.ERROR_500
        await rig.usable(await rig.start("decode"), await rig.start("decode"))
        first = list(rig.decodes)
        for engine in first:
            engine.close_gate(Gate.RESERVE)
        client = await send(rig)
        await until(lambda: any(engine.seen for engine in first))
        await rig.usable(*[await rig.start(role, "r2") for role in ("prefill", "decode")])
        for engine in first:
            engine.open_gate(Gate.RESERVE)
        assert (await client.receive()).status == 200
        assert sorted(num_seen(*rig.decodes)) == [0, 0, 1, 1]
        assert revisions_of_pairs(rig) == {("r1", "r1"), ("r2", "r2")}


async def test_without_another_revision_it_ends_at_once_with_one_error() -> None:
    async with running_kube_rig(on_prefill_failure="fail") as rig:
        other = await rig.start("decode")
        await rig.usable(other)
        rig.prefill.fault = Fault.ERROR_500
        answer = await post(rig)
        assert (answer.status, answer.json()["error"]["code"]) == (502, "prefill_failed")
        assert sorted(num_seen(*rig.decodes)) == [0, 1]


async def test_while_another_prefill_is_left_a_terminating_one_is_not_asked() -> None:
    async with running_kube_rig(pairs=2) as rig:
        for decode in rig.decodes:
            decode.close_gate(Gate.RESERVE)
        clients = [await send(rig) for _ in range(4)]
        await until(lambda: sum(num_seen(*rig.decodes)) == 4)
        rig.terminate(rig.prefills[0])
        await rig.becomes(rig.prefills[0], "finishing")
        for decode in rig.decodes:
            decode.open_gate(Gate.RESERVE)
        assert [(await client.receive()).status for client in clients] == [200] * 4
        assert num_seen(*rig.prefills) == [0, 4]
