"""What the benchmarks' own client of an API server does when a watch ends. A loopback server stands for it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from benchmarks.kube_user import KubeUser, WatchLost


def line(kind: str, name: str, version: int) -> str:
    return json.dumps({"type": kind, "object": {"metadata": {"name": name, "resourceVersion": str(version)}}}) + "\n"


WATCHES = (
    line("ADDED", "a", 4) + line("MODIFIED", "b", 7),
    "",
    line("DELETED", "c", 9),
    json.dumps({"type": "ERROR", "object": {"message": "too old resource version"}}) + "\n",
)


async def follow(shown: list[str], asked: list[str]) -> None:
    """``shown`` and ``asked`` get the names of all events, and the versions that were asked for."""

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query.get("resourceVersion", ""))
        return web.Response(text=WATCHES[len(asked) - 1])

    app = web.Application()
    app.router.add_get("/pods", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            async for _, body in KubeUser(session, f"http://127.0.0.1:{runner.addresses[0][1]}").watch("/pods"):
                shown.append(body["metadata"]["name"])
    finally:
        await runner.cleanup()


def test_a_watch_goes_on_where_the_server_ended_it_and_says_when_it_cannot() -> None:
    shown: list[str] = []
    asked: list[str] = []
    with pytest.raises(WatchLost, match="/pods: too old resource version"):
        asyncio.run(follow(shown, asked))
    assert (shown, asked) == (["a", "b", "c"], ["", "7", "7", "9"])
