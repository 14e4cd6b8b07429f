"""A stream that is held keeps no more than it needs: ``docs/router-peers.md`` has what a thousand of them take."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fakes.faults import Gate
from fakes.router import PROMPT, Rig, running_rig, send, until
from pdcluster_router.core.apis.rewrite import ClientBody
from pdcluster_router.http.connection import Call

pytestmark = pytest.mark.anyio

MARK = "a prompt that is short"


@asynccontextmanager
async def held_stream() -> AsyncIterator[Rig]:
    """A router whose one client has had the first token of its stream, and gets the rest when the block ends."""
    async with running_rig() as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, {**PROMPT, "prompt": MARK, "stream": True})
        await client.reader.readuntil(b"Hello")
        yield rig
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")
        assert vars(rig.connection_of(client)) == {}, "an attribute has no slot: see http/slots.py"


def bodies_with_the_mark() -> int:
    found = [one for one in gc.get_objects() if type(one) is ClientBody]
    return sum(MARK.encode() in bytes(one._raw) for one in found)


async def test_a_stream_that_has_begun_forgets_its_small_prompt() -> None:
    async with held_stream():
        await until(lambda: not bodies_with_the_mark())


async def test_a_call_forgets_the_task_that_has_made_its_connection() -> None:
    async with held_stream():
        calls = [one for one in gc.get_objects() if type(one) is Call and one.connection is not None]
        assert calls
        assert [one.cancel_connect for one in calls if one.cancel_connect is not None] == []


async def test_a_page_leaves_no_attribute_without_a_slot() -> None:
    async with running_rig() as rig:
        assert vars(rig.connection_of(await rig.served_client())) == {}
