"""What requests in parts may take of the router: memory, connections, places of clients."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.faults import Fault, Gate
from fakes.router import Rig, post, running_rig, send, until
from pdcluster_router.core.apis.messages import MAX_ANSWER_BYTES

pytestmark = pytest.mark.anyio

TWO: dict[str, Any] = {"model": "m", "prompt": ["once", "upon"], "max_tokens": 8}


async def test_answers_of_parts_that_are_too_long_together_end_before_they_are_whole(rig: Rig) -> None:
    """The router holds them all: the limit is that of the whole answer, and no engine is to blame."""
    begin = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99999999\r\n\r\n"
    rig.decode.fault, rig.decode.raw = Fault.RAW, begin + b" " * (MAX_ANSWER_BYTES // 2 + 1)
    answer = await post(rig, TWO)
    assert (answer.status, answer.json()["error"]["code"]) == (502, "decode_lost")
    assert b"longer than" in answer.body
    await rig.settled()
    assert await rig.failures() == {"decode_lost": 1, "withdrawn": 2}


async def test_parts_beyond_a_quarter_of_the_clients_places_are_not_made() -> None:
    """Each part has connections and a call of its own: what finds no place is prefilled by decode as a whole."""
    async with running_rig(max_connections=8) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        three = {**TWO, "prompt": ["a", "b", "c"]}
        first = await send(rig, three)
        await until(lambda: len(rig.prefill.seen) == 3)
        assert (await post(rig, TWO)).status == 200
        assert (rig.decode.seen[-1].body["prompt"], rig.decode.seen[-1].params) == (TWO["prompt"], None)
        rig.prefill.open_gate(Gate.PREFILL)
        assert len((await first.receive()).json()["choices"]) == 3
        await rig.settled()
        assert len((await post(rig, three)).json()["choices"]) == 3
