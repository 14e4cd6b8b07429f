"""A flood of new connections while each request needs connections to engines: no request of a client that was there
before fails for want of a descriptor."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from fakes.http import RawClient
from fakes.router import COMPLETIONS, PROMPT, STREAM
from integration.router_scene import Scene, running_scene
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

NUM_MEMBERS = 6
"""As many as 80 descriptors allow."""
NUM_HELD = 100


async def flood(scene: Scene) -> None:
    """Ever new connections that say nothing, ``NUM_HELD`` at most. Until it is cancelled."""
    held: list[RawClient] = []
    while True:
        with suppress(OSError):
            held.append(await scene.client())
        if len(held) > NUM_HELD:
            held.pop(0).leave()


async def refusals(member: RawClient) -> list[bytes]:
    answers = [await member.post(COMPLETIONS, PROMPT) for _ in range(3)]
    return [answer.body for answer in answers if answer.status != 200]


async def test_members_are_served_while_others_take_all_descriptors_again_and_again() -> None:
    async with running_scene(descriptors=80, num_prefill=3, num_decode=3) as scene:
        members = [await scene.client() for _ in range(NUM_MEMBERS)]
        for member in members:
            assert (await member.get("/health")).status == 200
        flooding = asyncio.create_task(flood(scene))
        async with asyncio.timeout(PATIENCE_S):
            refused = await asyncio.gather(*map(refusals, members))
        flooding.cancel()
        assert refused == [[]] * NUM_MEMBERS


async def test_a_client_that_was_there_is_served_while_idle_ones_hold_all_that_they_can_get() -> None:
    """Descriptors for engines are kept."""
    async with running_scene(descriptors=80) as scene:
        first = await scene.client()
        assert (await first.get("/health")).status == 200
        for _ in range(NUM_HELD):
            await scene.client()
        async with asyncio.timeout(PATIENCE_S):
            answer = await first.post(COMPLETIONS, PROMPT)
            assert answer.status == 200, (answer.body, scene.log.read_text())
            assert (await first.post(COMPLETIONS, STREAM)).is_whole
