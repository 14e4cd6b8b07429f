"""A page waits for a client that takes no bytes; an answer that does not wait costs no event."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from pdcluster_router.http.flow import Flow

pytestmark = pytest.mark.anyio


def flow() -> Flow:
    return Flow(cast("asyncio.Transport", None), lambda: None, cast("Any", None))


async def test_nothing_waits_while_the_client_takes_bytes() -> None:
    await flow().drain()


async def test_a_page_waits_until_the_client_takes_bytes_again() -> None:
    paused = flow()
    paused.pause_writing()
    waiting = [asyncio.ensure_future(paused.drain()) for _ in range(2)]
    await asyncio.sleep(0)
    assert [one.done() for one in waiting] == [False, False]
    paused.resume_writing()
    paused.pause_writing()  # At once again: what waited may write, as with uvicorn's own event.
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    again = asyncio.ensure_future(paused.drain())
    await asyncio.sleep(0)
    assert not again.done()
    paused.resume_writing()
    await asyncio.wait_for(again, 5)


async def test_a_page_that_is_cancelled_while_it_waits_leaves_nothing_over() -> None:
    paused = flow()
    paused.pause_writing()
    waiting = asyncio.ensure_future(paused.drain())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    paused.resume_writing()
    await asyncio.wait_for(paused.drain(), 5)
