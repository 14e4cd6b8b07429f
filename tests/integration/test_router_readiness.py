"""What an engine gets that Kubernetes calls not ready: nothing at first, and the last engine's work later."""

from __future__ import annotations

import pytest

from fakes.kube_rig import KubeRig, running_kube_rig
from fakes.router import post

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
