"""``why`` of a request that is served in parts: of the whole and of each part, while it runs and afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from fakes.answers import END
from fakes.faults import Fault, Gate
from fakes.router import Rig, orders, post, running_rig, send, until
from pdcluster_protocol.kept import KeptAnswer, KeptRequest, path_for

pytestmark = pytest.mark.anyio

TWO: dict[str, Any] = {"model": "m", "prompt": ["once", "upon"], "max_tokens": 8}


async def about(rig: Rig, name: str) -> KeptRequest:
    answer = await (await rig.internal()).get(path_for(name))
    (request,) = msgspec.json.decode(answer.body, type=KeptAnswer).requests
    return request


async def test_why_tells_of_the_whole_and_of_each_part_and_while_it_runs() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, TWO, **{"x-request-id": "R"})
        await until(lambda: len(rig.prefill.seen) == 2)
        running = await about(rig, "R")
        rig.prefill.open_gate(Gate.PREFILL)
        await client.receive()
        await rig.settled()
        whole, part = await about(rig, "R"), await about(rig, "R-1")
    assert (running.outcome, running.ended_at_unix_s) == ("", None)
    assert "waits for the prefill engine" in running.cause
    assert (whole.outcome, whole.status, whole.cause) == ("ok", 200, "")
    assert Counter(moment.what for moment in whole.moments) == dict.fromkeys(
        ("decode_sent", "reserved", "prefill_sent", "prefill_replied", "first_byte"), 2
    )
    assert [moment.at_s for moment in whole.moments] == sorted(moment.at_s for moment in whole.moments)
    assert {moment.engine for moment in whole.moments} == {"decode-0", "decode-1", "prefill-0"}
    assert (part.outcome, len(part.moments)) == ("ok", 5)


async def test_why_of_a_whole_that_runs_tells_of_the_part_that_is_stuck() -> None:
    """The newest moment is that of the other part, whose answer flows."""
    async with running_rig(num_prefill=2) as rig:
        rig.prefills[1].close_gate(Gate.PREFILL)
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, {**TWO, "stream": True}, **{"x-request-id": "R"})
        await until(lambda: len(orders(rig)) == 2)
        whole = await about(rig, "R")
        while whole.moments[-1].what != "first_byte":
            await asyncio.sleep(0)
            whole = await about(rig, "R")
        parts = [await about(rig, name) for name in ("R-0", "R-1")]
        rig.prefills[1].open_gate(Gate.PREFILL)
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        await client.reader.readuntil(END)
    (stuck,) = [part for part in parts if part.moments[-1].what == "prefill_sent"]
    assert whole.cause == f"of its part {stuck.request_id}: {stuck.cause}"
    assert "waits for the prefill engine (prefill-1)" in whole.cause
    assert whole.cure == stuck.cure


async def test_why_names_the_failure_of_the_part_that_failed() -> None:
    async with running_rig(on_prefill_failure="fail", num_prefill=1) as rig:
        rig.prefill.faults_to_come = [Fault.HANG, Fault.ERROR_500]
        answer = await post(rig, TWO, {"x-request-id": "R"})
        assert answer.status == 502
        await rig.settled()
        whole, withdrawn = await about(rig, "R"), await about(rig, "R-0")
    assert (whole.outcome, whole.error, whole.status) == ("prefill_failed", "prefill_failed", 502)
    assert "prefill-0 answered 500" in whole.cause
    assert "withdrawn" not in {moment.what for moment in whole.moments}
    assert "one part of a request that had ended" in withdrawn.cause
