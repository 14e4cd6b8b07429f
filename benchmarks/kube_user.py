"""An administrator of an API server for benchmarks: plain writes, and watches that others can wait for.

Sessions are the operator's own (``pdcluster_kube.session``), so that a client costs the same on both sides.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final

import aiohttp

Object = dict[str, Any]

JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_WATCH_S: Final = 3600


class WriteRefused(Exception):
    """The API server said no. Nothing in a benchmark is meant to be refused."""


class WatchLost(Exception):
    """What changed in between cannot be had any more."""


class KubeUser:
    """Any number of tasks. ``num_writes``: so far."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.num_writes = 0

    async def create(self, path: str, body: Object) -> Object:
        """``path``: of all objects of its kind."""
        return await self._write("POST", path, body, JSON)

    async def merge(self, path: str, body: Object) -> Object:
        return await self._write("PATCH", path, body, MERGE)

    async def delete(self, path: str, *, is_forced: bool = False) -> Object:
        """A pod: told to go; forced: gone."""
        options: Object = {"gracePeriodSeconds": 0} if is_forced else {}
        return await self._write("DELETE", path, options, JSON)

    async def watch(self, path: str, accept: str = JSON) -> AsyncGenerator[tuple[str, Object]]:
        """What there is, then what changes, as (ADDED, MODIFIED or DELETED, object). Until it is closed.

        The API server ends a watch whose reader cannot keep up; the next one goes on where it ended.

        Raises:
            WatchLost: It has forgotten what was there when the watch ended.
        """
        version = ""
        while True:
            async for kind, body in self._watch_once(path, accept, version):
                version = _version_after(path, kind, body)
                yield kind, body

    async def _watch_once(self, path: str, accept: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Ends when the server ends it."""
        query = {"watch": "1", "timeoutSeconds": str(_WATCH_S), **({"resourceVersion": version} if version else {})}
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Accept": accept}
        async with self._session.get(self._url + path, params=query, headers=headers, timeout=timeout) as response:
            response.raise_for_status()
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]

    async def _write(self, method: str, path: str, body: Object, content_type: str) -> Object:
        """
        Raises:
            WriteRefused: See there.
        """
        self.num_writes += 1
        headers = {"Content-Type": content_type, "Accept": JSON}
        data = json.dumps(body).encode()
        async with self._session.request(method, self._url + path, data=data, headers=headers) as response:
            answer: Object = await response.json()
        if response.status >= 300:
            raise WriteRefused(f"{method} {path}: {response.status}: {answer.get('message')}")
        return answer


def _version_after(path: str, kind: str, body: Object) -> str:
    """
    Raises:
        WatchLost: See there.
    """
    if kind == "ERROR":
        raise WatchLost(f"{path}: {body.get('message')}")
    version: str = body["metadata"]["resourceVersion"]
    return version


class Board:
    """What a watch has shown last of each object, by name. Event loop only; one task shows, anybody waits."""

    def __init__(self) -> None:
        self._shown: dict[str, Object] = {}
        self._waiting: dict[str, list[tuple[Callable[[Object], bool], asyncio.Future[float]]]] = {}

    async def follow(self, user: KubeUser, path: str, accept: str = JSON) -> None:
        """Until it is cancelled."""
        async for kind, body in user.watch(path, accept):
            if kind == "DELETED":
                self._shown.pop(body["metadata"]["name"], None)
            else:
                self.show(body)

    def show(self, body: Object) -> None:
        """Whoever waited for this knows."""
        name = body["metadata"]["name"]
        self._shown[name] = body
        still = []
        for is_it, future in self._waiting.pop(name, []):
            if future.cancelled():
                continue
            if is_it(body):
                future.set_result(asyncio.get_running_loop().time())
            else:
                still.append((is_it, future))
        if still:
            self._waiting[name] = still

    def expect(self, name: str, is_it: Callable[[Object], bool]) -> asyncio.Future[float]:
        """When the object is shown so, on the loop's clock; now, if it is."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        if name in self._shown and is_it(self._shown[name]):
            future.set_result(loop.time())
        else:
            self._waiting.setdefault(name, []).append((is_it, future))
        return future

    def expect_next(self, name: str) -> asyncio.Future[float]:
        """When the object is shown in another state than now."""
        version = self._shown[name]["metadata"]["resourceVersion"] if name in self._shown else ""
        return self.expect(name, lambda body: body["metadata"]["resourceVersion"] != version)
