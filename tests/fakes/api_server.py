"""An API server with the kinds that the operator knows, on real sockets; ``ApiStore`` decides what writes do.

Says what it was asked, and can fail as real ones do: ``faults``, ``cut_watches``, ``forget_history``, ``stop``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from fakes.api_store import ApiError, ApiStore, At, Change, Object, owner
from integration.ports import fresh_port
from pdcluster_operator.kinds import GROUP_SET, KINDS, Kind

_MORE: Final = (
    Kind("v1", "Namespace", "namespaces"),
    Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions"),
)


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str = ""

    @property
    def is_dry(self) -> bool:
        return "dryRun" in self.query

    @property
    def is_write(self) -> bool:
        return self.method != "GET" and not self.is_dry


def is_parting(asked: Asked) -> bool:
    """Whether somebody gives the Lease back."""
    return "/leases" in asked.path and asked.is_write and asked.body["spec"]["holderIdentity"] == ""


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests that match. ``status`` 0: no answer ever."""

    matches: Callable[[Asked], bool]
    status: int
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Watch:
    plural: str
    namespace: str | None
    selector: str
    request: web.Request
    response: web.StreamResponse
    changes: asyncio.Queue[Change | None] = field(default_factory=asyncio.Queue)

    def matches(self, body: Object | None, at: At) -> bool:
        is_here = at[0] == self.plural and self.namespace in (None, at[1])
        return is_here and body is not None and selects(self.selector, body)


class ApiServer:
    """``url`` after ``start``. ``is_group_served``: whether LeaderWorkerSets are a kind here."""

    def __init__(self, *, is_group_served: bool = False) -> None:
        self.store = ApiStore()
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.url = ""
        self.served = {kind for kind in KINDS.values() if is_group_served or kind != GROUP_SET} | set(_MORE)
        self._watches: set[Watch] = set()
        self._oldest = 0
        self._runner: web.AppRunner | None = None
        self._port = fresh_port()

    async def start(self) -> None:
        """Also after ``stop``: the same port, and what was stored."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        assert self._runner is not None
        self.cut_watches()
        await self._runner.cleanup()

    @property
    def writes(self) -> list[Asked]:
        """Writes but for those of the Lease."""
        return [one for one in self.asked if one.is_write and "/leases" not in one.path]

    def tell(self) -> None:
        """Watches hear of what the test did to the store itself."""
        for watch in self._watches:
            watch.changes.put_nowait(None)

    def cut_watches(self) -> None:
        for watch in self._watches:
            if watch.request.transport is not None:
                watch.request.transport.abort()

    def forget_history(self) -> None:
        """Versions before now are too old for a watch."""
        self._oldest = self.store.version

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        authorization = request.headers.get("Authorization", "")
        asked = Asked(request.method, request.path, dict(request.query), body, authorization)
        self.asked.append(asked)
        if fault := next((one for one in self.faults if one.times and one.matches(asked)), None):
            fault.times -= 1
            if not fault.status:
                await asyncio.Event().wait()
            error = ApiError(fault.status, "Fault", "a fault of the test")
            return web.json_response(error.status, status=fault.status, headers=fault.headers)
        try:
            found = self._discover(request.path)
            if found is not None:
                return web.json_response(found)
            return await self._serve_objects(request, asked)
        except ApiError as error:
            return web.json_response(error.status, status=error.code)

    def _discover(self, path: str) -> Object | None:
        roots = {kind.root for kind in self.served}
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            versions = {kind.api_version for kind in self.served if kind.group}
            return {"groups": [_group_of(version) for version in sorted(versions)]}
        if path not in roots:
            return None
        kinds = [kind for kind in self.served if kind.root == path]
        return {"resources": [_resource_of(kind) for kind in kinds]}

    async def _serve_objects(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        kind, namespace, name, subresource = self._parse(request.path)
        if not name:
            if request.method == "POST":
                assert isinstance(asked.body, dict)
                at = (kind.plural, namespace or "", asked.body["metadata"]["name"])
                manager = owner(asked.query.get("fieldManager", "test"), "Update")
                return self._wrote(self._store_for(at, asked).create(at, asked.body, manager), 201)
            if asked.query.get("watch") == "true":
                return await self._watch(request, kind, namespace)
            return web.json_response(self._list(kind, namespace, asked.query))
        return self._serve_one((kind.plural, namespace or "", name), subresource, request, asked)

    def _serve_one(self, at: At, subresource: str, request: web.Request, asked: Asked) -> web.StreamResponse:
        manager = asked.query.get("fieldManager", "test")
        body = asked.body or {}
        store = self._store_for(at, asked)
        if request.method == "GET":
            return web.json_response(store.read(at))
        if request.method == "PUT":
            return self._wrote(store.update(at, body, owner(manager, "Update")))
        if request.method == "DELETE":
            return self._wrote(store.delete(at, body.get("preconditions", {})))
        if request.content_type == "application/apply-patch+yaml":
            is_forced = asked.query.get("force") == "true"
            return self._wrote(store.apply(at, body, owner(manager, "Apply", subresource), force=is_forced))
        assert request.content_type == "application/merge-patch+json"
        return self._wrote(store.merge(at, body, owner(manager, "Update", subresource)))

    def _store_for(self, at: At, asked: Asked) -> ApiStore:
        """A dry run is done to a copy."""
        return self.store.copy_of(at) if asked.is_dry else self.store

    def _wrote(self, body: Object, status: int = 200) -> web.Response:
        self.tell()
        return web.json_response(body, status=status)

    def _parse(self, path: str) -> tuple[Kind, str | None, str, str]:
        for kind in self.served:
            if path.startswith(kind.root + "/"):
                parts = path.removeprefix(kind.root + "/").split("/")
                namespace = None
                if parts[0] == "namespaces" and len(parts) > 2:
                    namespace, parts = parts[1], parts[2:]
                if parts[0] == kind.plural:
                    name, subresource = ([*parts[1:], "", ""])[:2]
                    return kind, namespace, name, subresource
        raise ApiError(404, "NotFound", "the server could not find the requested resource")

    def _list(self, kind: Kind, namespace: str | None, query: Mapping[str, str]) -> Object:
        selector = query.get("labelSelector", "")
        items = [one for one in self.store.all_of(kind.plural, namespace) if selects(selector, one)]
        start = int(query.get("continue", 0))
        stop = start + int(query.get("limit", len(items)))
        metadata = {"resourceVersion": str(self.store.version), "continue": str(stop) if stop < len(items) else ""}
        page = {"metadata": metadata, "items": items[start:stop]}
        return {"apiVersion": kind.api_version, "kind": f"{kind.name}List", **page}

    async def _watch(self, request: web.Request, kind: Kind, namespace: str | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        sent = int(request.query["resourceVersion"])
        if sent < self._oldest:
            await _say(response, "ERROR", ApiError(410, "Expired", "too old resource version").status)
            return response
        watch = Watch(kind.plural, namespace, request.query.get("labelSelector", ""), request, response)
        self._watches.add(watch)
        try:
            while True:
                for change in [one for one in self.store.history if one.version > sent]:
                    sent = change.version
                    await _tell(watch, change)
                await watch.changes.get()
        except (ConnectionError, asyncio.CancelledError):
            return response
        finally:
            self._watches.discard(watch)


async def _tell(watch: Watch, change: Change) -> None:
    was, is_ = watch.matches(change.before, change.at), watch.matches(change.after, change.at)
    if change.kind == "DELETED" or (was and not is_):
        if was:
            await _say(watch.response, "DELETED", change.after)
    elif is_:
        await _say(watch.response, "MODIFIED" if was else "ADDED", change.after)


async def _say(response: web.StreamResponse, kind: str, body: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")


def selects(selector: str, body: Object) -> bool:
    """``a=b,c``: equality and presence."""
    own = body["metadata"].get("labels") or {}
    terms = [term.partition("=") for term in selector.split(",") if term]
    return all(own.get(name) == value if equals else name in own for name, equals, value in terms)


def _group_of(api_version: str) -> Object:
    group, _, version = api_version.partition("/")
    only = {"groupVersion": api_version, "version": version}
    return {"name": group, "versions": [only], "preferredVersion": only}


def _resource_of(kind: Kind) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    is_namespaced = kind not in _MORE
    return {
        "name": kind.plural,
        "singularName": kind.name.lower(),
        "kind": kind.name,
        "namespaced": is_namespaced,
        "verbs": verbs,
    }
