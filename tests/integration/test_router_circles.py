"""A request that is over is freed at once: nothing of it waits until Python looks for circles of objects."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from fakes.engine import Fault, Gate
from fakes.router import COMPLETIONS, PROMPT, Rig, running_rig, send
from patience import PATIENCE_S
from pdcluster_router.requests.exchange import Exchange
from pdcluster_router.requests.legs import PrefillAttempts
from pdcluster_router.requests.relay import Relay
from pdcluster_router.requests.reservation import ReservationCalls

pytestmark = pytest.mark.anyio

BODIES = [PROMPT, {**PROMPT, "stream": True}, {**PROMPT, "n": 2}]
PARTS = (Exchange, Relay, ReservationCalls, PrefillAttempts)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> list[str]:
    return sorted(type(one).__name__ for one in gc.get_objects() if type(one) in PARTS)


@pytest.mark.parametrize("body", BODIES, ids=["plain", "stream", "local"])
@pytest.mark.parametrize("fault", [Fault.NONE, Fault.ERROR_500, Fault.DIE, Fault.ERROR_MID_STREAM])
async def test_nothing_is_left_of_a_request(body: dict[str, object], fault: Fault, no_collector: None) -> None:
    async with running_rig(num_prefill=2, num_decode=2) as rig:
        rig.prefill.fault = rig.decode.fault = fault
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(4):
                await (await rig.client()).post(COMPLETIONS, body)
        await rig.settled()
        assert left() == []


async def test_nothing_is_left_of_a_request_whose_client_has_left(rig: Rig, no_collector: None) -> None:
    rig.prefill.close_gate(Gate.REPLY)
    client = await send(rig, PROMPT)
    await rig.prefill.next_request()
    assert left() != []
    client.leave()
    await rig.settled()
    assert left() == []
