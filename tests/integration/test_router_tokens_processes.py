"""Tokens at a router with several processes: one that starts while the URL of the keys fails knows the keys."""

from __future__ import annotations

import os
import signal

import pytest

from fakes.identity import ISSUER, bearer, key_set, running_key_fake, signing_key, token_of
from fakes.router import PROMPT
from integration.router_scene import Scene, until
from integration.test_router_processes import NUM, lines_with, num_lines, pids_serving, processes

pytestmark = pytest.mark.anyio


async def is_renewed(scene: Scene, before: set[int]) -> bool:
    return num_lines(scene, "processes are replaced") == 1 and not before & set(pids_serving(scene))


async def test_a_renewal_while_the_url_fails_leaves_processes_that_know_the_keys() -> None:
    async with running_key_fake(key_set(signing_key())) as server:
        flags = (f"--jwt-key-set={server.url}", f"--jwt-issuer={ISSUER}", "--jwt-audience=pool")
        async with processes(*flags) as scene:
            before = set(pids_serving(scene))
            await server.stop()
            os.kill(scene.pid, signal.SIGUSR2)
            await until(lambda: is_renewed(scene, before))
            for _ in range(4 * NUM):
                assert (await scene.ask(PROMPT, headers=bearer(token_of()))).status == 200
            assert len(lines_with(scene, "token keys not read")) >= NUM
        await server.start()
