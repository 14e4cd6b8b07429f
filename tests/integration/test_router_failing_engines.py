"""An engine that fails fast does not take the pool's work: it is left alone, and asked again later."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter

import pytest

from fakes.faults import Fault
from fakes.http import RawClient
from fakes.router import COMPLETIONS, PROMPT, Rig, running_rig
from patience import PATIENCE_S
from pdcluster_router.core.engines.breaker import FIRST_ERA, NUM_IN_A_ROW

pytestmark = pytest.mark.anyio


async def ask(rig: Rig, number: int, at_once: int, body: object = PROMPT) -> Counter[int]:
    """The statuses of ``number`` requests from ``at_once`` clients, each of which asks when it has its answer."""
    statuses: Counter[int] = Counter()
    raw = json.dumps(body).encode()
    left = iter(range(number))

    async def ask_in_a_row(client: RawClient) -> None:
        for _ in left:
            statuses[(await client.post(COMPLETIONS, raw)).status] += 1

    clients = [await rig.client() for _ in range(at_once)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(ask_in_a_row(client) for client in clients))
    return statuses


async def metrics_of(rig: Rig) -> str:
    return (await (await rig.internal()).get("/metrics")).body.decode()


async def test_one_of_three_decode_engines_that_answers_500_at_once_is_soon_left_alone() -> None:
    async with running_rig(num_decode=3) as rig:
        rig.decodes[0].fault = Fault.ERROR_500
        for engine in rig.decodes[1:]:
            engine.work_s = 0.05
        assert await ask(rig, 90, 9) == {200: 90}
        assert len(rig.decodes[0].seen) <= 20  # 80 before there was a breaker.


async def test_each_ejection_is_counted_by_role() -> None:
    """The gauge is 0 again when it is read a second later: an engine that comes and goes is seen in the counter."""
    async with running_rig(num_decode=2) as rig:
        assert 'pdcluster_router_engine_ejections_total{role="decode"} 0.0' in await metrics_of(rig)
        rig.decodes[0].fault = Fault.ERROR_500
        rig.decodes[1].work_s = 0.05
        assert await ask(rig, 60, 6) == {200: 60}
        said = await metrics_of(rig)
        counted = re.search(r'^pdcluster_router_engine_ejections_total\{role="decode"\} (.*)$', said, re.MULTILINE)
        assert counted is not None
        assert float(counted[1]) >= 1
        assert 'pdcluster_router_engine_ejections_total{role="prefill"} 0.0' in said


@pytest.mark.parametrize(
    ("role", "fault", "num_engines", "num_served"),
    [
        ("decode", Fault.ERROR_500, 3, 65),
        ("prefill", Fault.ERROR_500, 4, 62),
        ("prefill", Fault.ERROR_404, 4, 62),
    ],
)
async def test_most_engines_of_a_role_that_answer_errors_do_not_fail_the_pool(
    role: str, fault: Fault, num_engines: int, num_served: int
) -> None:
    """``num_served`` of 90. Before there was a breaker: 5 of 90 for decode, 6 of 60 for prefill."""
    rig_of = {"decode": running_rig(num_decode=num_engines), "prefill": running_rig(num_prefill=num_engines)}
    async with rig_of[role] as rig:
        *broken, whole = {"decode": rig.decodes, "prefill": rig.prefills}[role]
        for engine in broken:
            engine.fault = fault
        whole.work_s = 0.05
        assert (await ask(rig, 90, 9))[200] >= num_served
        num_tried = sum(len(engine.seen) for engine in broken)
        statuses = await ask(rig, 18, 9)
        num_tried = sum(len(engine.seen) for engine in broken) - num_tried
        # Each broken one is tried anew, a second after it was left alone and later and later. A request has two tries.
        assert num_tried <= 2 * len(broken)
        assert statuses[200] >= 18 - num_tried // 2


async def test_a_decode_engine_that_knows_not_the_model_does_not_get_nearly_all_requests() -> None:
    async with running_rig(num_decode=3) as rig:
        rig.decodes[0].fault = Fault.ERROR_404
        for engine in rig.decodes[1:]:
            engine.work_s = 0.05
        statuses = await ask(rig, 90, 9)
        assert statuses[404] <= 45, statuses  # 82 before it counted as load; whether the client is wrong nobody knows.


async def test_requests_that_every_engine_hangs_up_on_eject_none() -> None:
    async with running_rig(num_decode=4) as rig:
        for engine in rig.decodes:
            engine.fault = Fault.DIE
        assert await ask(rig, 20, 1) == {502: 20}
        page = (await (await rig.internal()).get("/pdcluster/pool")).json()
        assert {engine["circuit"] for engine in page["engines"]} == {"closed"}


async def test_an_engine_that_hangs_up_on_what_another_one_serves_is_left_alone() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].fault = Fault.DIE
        rig.decodes[1].work_s = 0.05
        assert await ask(rig, 60, 6) == {200: 60}
        assert len(rig.decodes[0].seen) <= 20


def _post(body: bytes) -> bytes:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_a_request_that_ends_well_ends_the_row_of_failures_of_both_its_engines() -> None:
    async with running_rig() as rig:
        engines = rig.router.services.all_engines()
        for _ in range(2):
            for engine in engines:
                for _ in range(NUM_IN_A_ROW - 1):
                    engine.failed(engine.breaker.era)
            assert await ask(rig, 1, 1) == {200: 1}
        assert [engine.breaker.era for engine in engines] == [FIRST_ERA] * 2
