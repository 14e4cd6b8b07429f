"""``GET /pdcluster/pool`` at a glance: what runs, what waits, what failed lately."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.faults import Gate
from fakes.router import Rig, post, running_rig, send, until

pytestmark = pytest.mark.anyio


async def page_of(rig: Rig) -> dict[str, Any]:
    return dict((await (await rig.internal()).get("/pdcluster/pool")).json())


async def test_the_pools_page_says_what_runs_what_waits_and_what_failed_lately() -> None:
    async with running_rig(max_prefill_backlog_tokens=1, max_queued_requests=1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await send(rig)]
        await rig.prefill.next_request()
        clients.append(await send(rig))
        await until(lambda: rig.router.services.num_queued == 1)
        assert (await post(rig)).status == 429
        page = await page_of(rig)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await client.receive()).status for client in clients] == [200, 200]
        after = await page_of(rig)
    assert page["requests"] == {
        "running": 1,
        "queued": {"prefill": 1, "decode": 0},
        "backlog_tokens": {"prefill": 1, "decode": 0},
    }
    assert page["failures"] == {"seconds": 300.0, "kinds": {"queue_full": 1}}
    assert after["requests"]["queued"] == after["requests"]["backlog_tokens"] == {"prefill": 0, "decode": 0}
