"""An administrator of an API server for benchmarks: plain writes, and watches on whose events tasks can wait.

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
    """The API server refused a write. A benchmark makes no write that it should refuse."""


class WatchLost(Exception):
    """The API server has forgotten changes that the watch has not seen."""


class KubeUser:
    """One client; any number of tasks may use it. ``num_writes``: writes sent so far."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.num_writes = 0

    async def create(self, path: str, body: Object) -> Object:
        """``path``: the collection of all objects of this kind."""
        return await self._write("POST", path, body, JSON)

    async def merge(self, path: str, body: Object) -> Object:
        return await self._write("PATCH", path, body, MERGE)

    async def delete(self, path: str, *, is_forced: bool = False) -> Object:
        """Deletes an object. A pod on a node only begins to terminate; if ``is_forced``, it is gone."""
        options: Object = {"gracePeriodSeconds": 0} if is_forced else {}
        return await self._write("DELETE", path, options, JSON)

    async def watch(self, path: str, accept: str = JSON) -> AsyncGenerator[tuple[str, Object]]:
        """Yields the objects, then their changes, as (ADDED, MODIFIED or DELETED, object), until the caller closes it.

        The API server ends a watch whose reader cannot keep up; the next watch goes on from the last event.

        Raises:
            WatchLost: The API server has forgotten the changes since the last event.
        """
        version = ""
        while True:
            async for kind, body in self._watch_once(path, accept, version):
                version = _version_after(path, kind, body)
                yield kind, body

    async def _watch_once(self, path: str, accept: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """The events of one watch, until the server ends it."""
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
            WriteRefused: The answer is an error.
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
        WatchLost: The event is an error.
    """
    if kind == "ERROR":
        raise WatchLost(f"{path}: {body.get('message')}")
    version: str = body["metadata"]["resourceVersion"]
    return version


class Board:
    """The last state of each object that a watch showed, by name. Event loop only; one task shows, any task waits."""

    def __init__(self) -> None:
        self._shown: dict[str, Object] = {}
        self._waiting: dict[str, list[tuple[Callable[[Object], bool], asyncio.Future[float]]]] = {}

    async def follow(self, user: KubeUser, path: str, accept: str = JSON) -> None:
        """Shows the events of a watch, until it is cancelled."""
        async for kind, body in user.watch(path, accept):
            if kind == "DELETED":
                self._shown.pop(body["metadata"]["name"], None)
            else:
                self.show(body)

    def show(self, body: Object) -> None:
        """Keeps this state of the object, and wakes the tasks that waited for it."""
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
        """The time, on the loop's clock, at which ``is_it`` accepts the shown object; now, if it does already."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        if name in self._shown and is_it(self._shown[name]):
            future.set_result(loop.time())
        else:
            self._waiting.setdefault(name, []).append((is_it, future))
        return future

    def expect_next(self, name: str) -> asyncio.Future[float]:
        """The time, on the loop's clock, at which the object is shown in another state than now."""
        version = self._shown[name]["metadata"]["resourceVersion"] if name in self._shown else ""
        return self.expect(name, lambda body: body["metadata"]["resourceVersion"] != version)
