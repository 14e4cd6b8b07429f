"""An API server with the kinds that router and operator know, on real sockets; ``ApiStore`` decides what writes do.

Source of truth: Kubernetes' page "API concepts"; ``tests/contract/test_kube_api.py`` holds it to what a real one does.
Says what it was asked, and can fail as real ones do: ``faults`` breaks answers to come; ``cut_watches``, ``mute``,
``forget_history`` and ``stop`` what runs.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from aiohttp import web

from fakes.api_store import ApiError, ApiStore, At, Change, Object, owner
from integration.ports import fresh_port
from pdcluster_operator.kinds import KINDS, LEADER_WORKER_SET, Kind

SLICE: Final = Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
_MORE: Final = (
    SLICE,
    Kind("v1", "Namespace", "namespaces"),
    Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions"),
)


_CHUNKED: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH: Final = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"


@dataclass(frozen=True)
class Asked:
    """One request. ``at``: seconds of the event loop's clock."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str = ""
    at: float = 0.0

    @property
    def kind(self) -> str:
        """``watch``, or the method; ``list`` is the router's word for its only other one."""
        return "watch" if self.query.get("watch") == "true" else "list" if self.method == "GET" else self.method

    @property
    def is_dry(self) -> bool:
        return "dryRun" in self.query

    @property
    def is_write(self) -> bool:
        return self.method != "GET" and not self.is_dry


def is_list(asked: Asked) -> bool:
    return asked.kind == "list"


def is_watch(asked: Asked) -> bool:
    return asked.kind == "watch"


def is_parting(asked: Asked) -> bool:
    """Whether somebody gives the Lease back."""
    return "/leases" in asked.path and asked.is_write and asked.body["spec"]["holderIdentity"] == ""


class Broken(Enum):
    """An answer that is none, or half of one."""

    HANG = auto()
    """Reads the request and never says a word."""
    CUT = auto()
    """Half an answer."""
    NOT_HTTP = auto()
    NOT_JSON = auto()
    ENDS_AT_ONCE = auto()
    """A whole answer with nothing in it."""
    ENDS_AFTER_A_LINE = auto()
    """A bookmark, and then a whole end, as by a proxy that lets no answer last."""


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests that match. ``how``: a status, the bytes of a 200, or worse."""

    matches: Callable[[Asked], bool]
    how: int | bytes | Broken
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Watch:
    plural: str
    namespace: str | None
    selector: str
    request: web.Request
    response: web.StreamResponse
    changes: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)
    """Something may have changed. True: a bookmark is due."""

    def matches(self, body: Object | None, at: At) -> bool:
        is_here = at[0] == self.plural and self.namespace in (None, at[1])
        return is_here and body is not None and selects(self.selector, body)


class ApiServer:
    """``url`` after ``start``. ``is_group_served``: whether LeaderWorkerSets are a kind here."""

    def __init__(self, *, is_group_served: bool = False, token: str | None = None) -> None:
        self.store = ApiStore()
        self.namespace = "default"
        """Of the slices that ``put`` makes."""
        self.token = token
        """What a caller must show; None: nothing."""
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.url = ""
        self.served = {kind for kind in KINDS.values() if is_group_served or kind != LEADER_WORKER_SET} | set(_MORE)
        self._watches: set[Watch] = set()
        self._oldest = 0
        self._can_speak = asyncio.Event()
        self._can_speak.set()
        self._runner: web.AppRunner | None = None
        self._port = fresh_port()

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        """Also after ``stop``: the same port, and what was stored."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=context).start()
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        assert self._runner is not None
        self.cut_watches()
        await self._runner.cleanup()

    @property
    def writes(self) -> list[Asked]:
        """Writes but for those of the Lease."""
        return [one for one in self.asked if one.is_write and "/leases" not in one.path]

    def put(self, one: Object) -> None:
        """The EndpointSlice is there, as it is given."""
        at = (SLICE.plural, self.namespace, one["metadata"]["name"])
        write = self.store.update if at in self.store.objects else self.store.create
        write(at, {"apiVersion": SLICE.api_version, "kind": SLICE.name, **one})
        self.tell()

    def delete(self, name: str) -> None:
        """The EndpointSlice goes."""
        self.store.delete((SLICE.plural, self.namespace, name))
        self.tell()

    def tell(self) -> None:
        """Watches hear of what the test did to the store itself."""
        for watch in self._watches:
            watch.changes.put_nowait(False)

    def bookmark(self) -> None:
        """Every watch hears of the newest version."""
        for watch in self._watches:
            watch.changes.put_nowait(True)

    def mute(self) -> None:
        """Watches, open ones too, say nothing and never end, as behind a dead link."""
        self._can_speak.clear()

    def unmute(self) -> None:
        self._can_speak.set()

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
        now = asyncio.get_running_loop().time()
        asked = Asked(request.method, request.path, dict(request.query), body, authorization, now)
        self.asked.append(asked)
        if self.token is not None and authorization != f"Bearer {self.token}":
            return _refusal(ApiError(401, "Unauthorized", "Unauthorized"))
        if fault := next((one for one in self.faults if one.times and one.matches(asked)), None):
            fault.times -= 1
            return await self._fail(fault, request)
        try:
            found = self._discover(request.path)
            if found is not None:
                return web.json_response(found)
            return await self._serve_objects(request, asked)
        except ApiError as error:
            return _refusal(error)

    async def _fail(self, fault: Fault, request: web.Request) -> web.Response:
        if isinstance(fault.how, int):
            return _refusal(ApiError(fault.how, "Fault", "a fault of the test"), fault.headers)
        if isinstance(fault.how, bytes):
            return web.Response(body=fault.how)
        if fault.how is Broken.HANG:
            await asyncio.Event().wait()
        assert request.transport is not None
        request.transport.write(self._broken()[fault.how])
        request.transport.close()
        return web.Response()  # It goes nowhere.

    def _broken(self) -> dict[Broken, bytes]:
        line = _line("BOOKMARK", _bookmark(self.store.version))
        return {
            Broken.CUT: _LENGTH % (len(line) + 9, line),
            Broken.NOT_HTTP: b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
            Broken.NOT_JSON: _CHUNKED + b"6\r\n<html\n\r\n0\r\n\r\n",
            Broken.ENDS_AT_ONCE: _CHUNKED + b"0\r\n\r\n",
            Broken.ENDS_AFTER_A_LINE: _LENGTH % (len(line), line),
        }

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
        if any(path.startswith(kind.root + "/") for kind in self.served):
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        raise web.HTTPNotFound(text="404 page not found\n")

    def _list(self, kind: Kind, namespace: str | None, query: Mapping[str, str]) -> Object:
        uid, labels = query.get("fieldSelector", "").removeprefix("involvedObject.uid="), query.get("labelSelector", "")
        items = [one for one in self.store.all_of(kind.plural, namespace) if selects(labels, one)]
        items = [one for one in items if not uid or one["involvedObject"]["uid"] == uid]
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
            await self._say(response, "ERROR", ApiError(410, "Expired", "too old resource version").status)
            return response
        watch = Watch(kind.plural, namespace, request.query.get("labelSelector", ""), request, response)
        end = asyncio.get_running_loop().time() + float(request.query.get("timeoutSeconds", "3600"))
        self._watches.add(watch)
        try:
            await self._tell_until(watch, sent, end)
        except (ConnectionError, TimeoutError):
            await self._can_speak.wait()
        finally:
            self._watches.discard(watch)
        return response

    async def _tell_until(self, watch: Watch, sent: int, end: float) -> None:
        is_bookmark_due = False
        while True:
            for change in [one for one in self.store.history if one.version > sent]:
                sent = change.version
                await self._tell(watch, change)
            if is_bookmark_due:
                await self._say(watch.response, "BOOKMARK", _bookmark(sent))
            async with asyncio.timeout_at(end):
                is_bookmark_due = await watch.changes.get()

    async def _tell(self, watch: Watch, change: Change) -> None:
        was, is_ = watch.matches(change.before, change.at), watch.matches(change.after, change.at)
        if change.kind != "DELETED" and is_:
            await self._say(watch.response, "MODIFIED" if was else "ADDED", change.after)
        elif was and change.before is not None:
            # The API server, too, shows what has gone as it was.
            metadata = {**change.before["metadata"], "resourceVersion": str(change.version)}
            await self._say(watch.response, "DELETED", {**change.before, "metadata": metadata})

    async def _say(self, response: web.StreamResponse, kind: str, body: Object) -> None:
        """Each line in two chunks, to say that chunks are not lines."""
        line = _line(kind, body)
        await self._can_speak.wait()
        await response.write(line[:20])
        await asyncio.sleep(0.005)  # Else both are read as one.
        await response.write(line[20:])


def _bookmark(version: int) -> Object:
    return {"kind": SLICE.name, "metadata": {"resourceVersion": str(version), "creationTimestamp": None}}


def _line(kind: str, body: Object) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


def _refusal(error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(error.status, status=error.code, headers=headers)


_TERM: Final = re.compile(r"([^\s,=()]+)(?:=([^,]*)|\s+in\s+\(([^)]*)\))?")


def selects(selector: str, body: Object) -> bool:
    """``a=b,c,d in (e,f)``: equality, presence, and one of several."""
    own = body["metadata"].get("labels") or {}
    for name, value, values in (match.group(1, 2, 3) for match in _TERM.finditer(selector)):
        wanted = [value] if value is not None else values.split(",") if values is not None else [own.get(name)]
        if name not in own or own[name] not in wanted:
            return False
    return True


def _group_of(api_version: str) -> Object:
    group, _, version = api_version.partition("/")
    only = {"groupVersion": api_version, "version": version}
    return {"name": group, "versions": [only], "preferredVersion": only}


def _resource_of(kind: Kind) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    is_namespaced = kind == SLICE or kind not in _MORE
    return {
        "name": kind.plural,
        "singularName": kind.name.lower(),
        "kind": kind.name,
        "namespaced": is_namespaced,
        "verbs": verbs,
    }
