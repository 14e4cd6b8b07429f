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
LOCAL: Final[dict[str, Any]] = {**PROMPT, "echo": True}
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


async def fewest_calls(body: dict[str, Any], **settings: Any) -> list[str]:
    """Of several requests the one with the fewest: a probe may come between, or an answer in two pieces."""
    rows = []
    async with running_rig(probe_interval_s=60.0, **settings) as rig:
        client = await rig.client()
        for _ in range(NUM_REQUESTS):
            with counted() as passed:
                assert (await client.post(COMPLETIONS, body)).status == 200
                await asyncio.sleep(0.01)
            rows.append(passed)
    return min(rows, key=len)


@pytest.mark.parametrize(("body", "most"), [(LOCAL, 153), (PROMPT, 299)], ids=["local", "pair"])
async def test_a_request_passes_no_more_functions_than_it_did(body: dict[str, Any], most: int) -> None:
    passed = await fewest_calls(body)
    assert len(passed) <= most, f"{len(passed)}: {passed}"


@pytest.mark.parametrize(("body", "most_more"), [(LOCAL, 16), (PROMPT, 19)], ids=["local", "pair"])
async def test_spans_cost_a_request_few_functions(body: dict[str, Any], most_more: int) -> None:
    """Of each request: whether it is sampled, a line for each call to an engine, and its row in the queue."""
    nowhere = "http://127.0.0.1:1"
    without, traced = await fewest_calls(body), await fewest_calls(body, otlp_endpoint=nowhere)
    assert len(traced) - len(without) <= most_more, f"{len(traced)} after {len(without)}: {traced}"
    unchosen = await fewest_calls(body, otlp_endpoint=nowhere, trace_sample_ratio=0.0)
    assert len(unchosen) - len(without) <= 7, f"{len(unchosen)} after {len(without)}: {unchosen}"
