"""What requests in parts may take of the router: memory, connections, places of clients."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from fakes.answers import END
from fakes.faults import Fault, Gate
from fakes.http import request_bytes
from fakes.router import COMPLETIONS, Rig, post, raw, running_rig, send, until
from pdcluster_router.core.apis.messages import MAX_ANSWER_BYTES
from pdcluster_router.requests.exchange import Exchange
from pdcluster_router.requests.request import ClientRequest

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


@pytest.mark.parametrize(("num_header_bytes", "num_parts"), [(1_000, 64), (17_000, 1)])
async def test_many_parts_do_not_repeat_large_headers(num_header_bytes: int, num_parts: int) -> None:
    """A mebibyte in all parts at most: what repeats more is prefilled by decode as a whole."""
    async with running_rig(num_decode=2) as rig:
        headers = {"x-filler": "x" * num_header_bytes}
        assert (await post(rig, {**TWO, "prompt": ["a"] * 64}, headers)).status == 200
        assert sum(len(engine.seen) for engine in rig.decodes) == num_parts


@pytest.mark.parametrize("body", [TWO, {**TWO, "prompt": "once"}], ids=["parts", "whole"])
async def test_large_headers_of_a_small_request_are_not_kept_while_its_answer_flows(
    rig: Rig, body: dict[str, Any]
) -> None:
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await rig.client()
    await client.send(
        request_bytes(COMPLETIONS, json.dumps({**body, "stream": True}).encode(), {"x-filler": "f" * 50_000})
    )
    await client.reader.readuntil(b'"index":')
    await until(lambda: rig.router.room.used_bytes == 0)
    gc.collect()
    # Not ``isinstance``: another test's weak proxy, whose object is gone, would raise.
    assert not [one for one in gc.get_objects() if type(one) is ClientRequest and len(one.headers) > 40_000]
    rig.decode.open_gate(Gate.SECOND_TOKEN)
    assert b"[DONE]" in await client.reader.readuntil(END)


async def test_the_request_is_forgotten_once_each_part_has_its_answer(rig: Rig) -> None:
    """Its bytes take no room while answers last."""
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await send(rig, {**TWO, "stream": True})
    await client.reader.readuntil(b'"index":1')
    await until(lambda: rig.router.room.used_bytes == 0)
    rig.decode.open_gate(Gate.SECOND_TOKEN)
    assert b"[DONE]" in await client.reader.readuntil(END)


async def test_a_part_that_begins_while_the_client_is_slow_is_held_back_at_once() -> None:
    async with running_rig(num_decode=2) as rig:
        first, late = rig.decodes
        for engine in rig.decodes:
            engine.tokens, engine.padding = ["a"] * 40, "x" * 200_000
        late.close_gate(Gate.ANSWER)
        client = await rig.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
        await client.send(raw({**TWO, "stream": True}))
        await until(lambda: rig.connection_of(client).is_full)
        assert len(first.seen) == 1
        late.open_gate(Gate.ANSWER)
        relays = [one._relay for one in rig.router.services.running if isinstance(one, Exchange)]
        await until(lambda: [relay.is_paused for relay in relays] == [True, True])
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # likewise
        answer = await client.receive()
        assert answer.body.count(b'"index":0') == answer.body.count(b'"index":1') == 40
