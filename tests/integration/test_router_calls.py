"""How many functions of the router a request passes: no more than these. Each of them costs every request.

Counted, not timed, so the machine's load does not matter. Decode's call opens a connection here, which real engines
keep. ``benchmarks/router.py`` measures the time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

import pdcluster_router
from fakes.router import COMPLETIONS, PROMPT, running_rig

pytestmark = pytest.mark.anyio

ROUTER: Final = str(Path(pdcluster_router.__file__).parent)
NUM_REQUESTS: Final = 10
LOCAL: Final[dict[str, Any]] = {**PROMPT, "n": 2}
"""Decode prefills it by itself: one engine has it."""


@contextmanager
def counted() -> Iterator[list[str]]:
    """The functions of the router that are called meanwhile, in order."""
    passed: list[str] = []

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROUTER):
            passed.append(frame.f_code.co_qualname)

    sys.setprofile(called)
    try:
        yield passed
    finally:
        sys.setprofile(None)


async def fewest_calls(body: dict[str, Any]) -> list[str]:
    """Of several requests the one with the fewest: a probe may come between, or an answer in two pieces."""
    rows = []
    async with running_rig(probe_interval_s=60.0) as rig:
        client = await rig.client()
        for _ in range(NUM_REQUESTS):
            with counted() as passed:
                assert (await client.post(COMPLETIONS, body)).status == 200
                await asyncio.sleep(0.01)
            rows.append(passed)
    return min(rows, key=len)


@pytest.mark.parametrize(("body", "most"), [(LOCAL, 141), (PROMPT, 296)], ids=["local", "pair"])
async def test_a_request_passes_no_more_functions_than_it_did(body: dict[str, Any], most: int) -> None:
    passed = await fewest_calls(body)
    assert len(passed) <= most, f"{len(passed)}: {passed}"
