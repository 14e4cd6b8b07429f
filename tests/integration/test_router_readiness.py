"""What an engine gets that Kubernetes calls not ready: nothing at first, and the last engine's work later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.kube_rig import KubeRig, running_kube_rig
from fakes.router import post, running_rig, until
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member

pytestmark = pytest.mark.anyio


async def serve(rig: KubeRig, number: int) -> None:
    for _ in range(number):
        assert (await post(rig)).status == 200


async def test_an_engine_that_is_not_ready_gets_nothing_until_it_is() -> None:
    async with running_kube_rig() as rig:
        late = await rig.start("decode", ready=False)
        await rig.becomes(late, "starting")
        await serve(rig, 3)
        assert late.seen == []
        rig.mark(late, ready=True)
        await rig.usable(late)
        await serve(rig, 1)
        assert len(late.seen) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_last_engine_of_a_role_gets_work_also_when_it_is_not_ready_any_more(role: str) -> None:
    async with running_kube_rig() as rig:
        last = rig.prefill if role == "prefill" else rig.decode
        rig.mark(last, ready=False)
        await rig.becomes(last, "not_ready")
        await serve(rig, 2)
        assert (await (await rig.client()).get("/health")).status == 200
        other = await rig.start(role)
        await rig.usable(other)
        await serve(rig, 3)
        assert (len(last.seen), len(other.seen)) == (2, 3)


async def test_the_pools_page_says_which_revision_gets_requests() -> None:
    async with running_rig(num_prefill=2, num_decode=2, probe_interval_s=0.05) as rig:
        roster = rig.router.services.roster
        sides = ((Role.PREFILL, rig.prefills), (Role.DECODE, rig.decodes))
        members = [Member(engine.url, role, f"r{at}") for role, side in sides for at, engine in enumerate(side)]
        roster.update(members)
        await until(lambda: all(engine.is_healthy for engine in roster.all_engines()))
        rig.prefill.health_status = rig.decode.health_status = 503
        roster.update([replace(member, is_ready=member.revision == "r0") for member in members])
        await until(lambda: not any(engine.is_healthy for engine in roster.all_engines() if engine.revision == "r0"))
        page = (await (await rig.internal()).get("/pdcluster/pool")).json()
        assert {row["revision"]: row["serves"] for row in page["revisions"]} == {"r0": False, "r1": True}
        assert (await post(rig)).status == 200
        assert (len(rig.decodes[0].seen), len(rig.decodes[1].seen)) == (0, 1)
