"""What the benchmarks' own client of an API server does when a watch ends. A loopback server stands for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from benchmarks.kube_user import KubeUser, Object, WatchLost

Event = tuple[str, Object]


def seen(kind: str, name: str, version: int) -> Event:
    return kind, {"metadata": {"name": name, "resourceVersion": str(version)}}


@asynccontextmanager
async def user_of(*watches: list[Event]) -> AsyncIterator[tuple[KubeUser, list[str]]]:
    """Each watch shows the next of ``watches`` and ends. Beside it: the versions that were asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query.get("resourceVersion", ""))
        shown = watches[len(asked) - 1]
        return web.Response(text="".join(json.dumps({"type": kind, "object": body}) + "\n" for kind, body in shown))

    app = web.Application()
    app.router.add_get("/pods", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield KubeUser(session, f"http://127.0.0.1:{runner.addresses[0][1]}"), asked
    finally:
        await runner.cleanup()


async def follow(*watches: list[Event], num_events: int) -> tuple[list[str], list[str]]:
    """(names of the events, versions that were asked for)."""
    names: list[str] = []
    async with user_of(*watches) as (user, asked), aclosing(user.watch("/pods")) as events:
        async for _, body in events:
            names.append(body["metadata"]["name"])
            if len(names) == num_events:
                break
    return names, asked


def test_a_watch_that_the_server_ends_goes_on_where_it_ended() -> None:
    first = [seen("ADDED", "a", 4), seen("MODIFIED", "b", 7)]
    names, asked = asyncio.run(follow(first, [], [seen("DELETED", "c", 9)], num_events=3))
    assert names == ["a", "b", "c"]
    assert asked == ["", "7", "7"]


def test_a_watch_that_cannot_go_on_says_so_and_shows_nothing_false() -> None:
    gone = [("ERROR", {"message": "too old resource version"})]
    with pytest.raises(WatchLost, match="/pods: too old resource version"):
        asyncio.run(follow([seen("ADDED", "a", 4)], gone, num_events=2))
