"""An API server that knows EndpointSlices only, and keeps the contract of list and watch on real sockets.

Source of truth: Kubernetes' page "API concepts", "Efficient detection of changes"; ``tests/contract/test_kube_api.py``
holds it to what a real one does. ``Fault`` says what goes wrong with the lists and watches to come; ``cut_watches``,
``mute`` and ``stop`` break what runs.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from fakes.http import read_head
from integration.ports import fresh_port
from pdcluster_protocol import labels

Object = dict[str, Any]
FIRST_VERSION: Final = 100


class Fault(Enum):
    TOO_MANY = auto()
    """429, with Retry-After."""
    ERROR_500 = auto()
    FORBIDDEN = auto()
    GONE = auto()
    """410 as the status of the answer; a version that is too old gives it as an event."""
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
class Asked:
    """One request. ``kind``: list or watch. ``at``: seconds of the event loop's clock."""

    kind: str
    query: dict[str, str]
    headers: dict[str, str]
    at: float


@dataclass
class Event:
    """One change: what an object was before and is now; None where there was none, or is none."""

    version: int
    before: Object | None
    after: Object | None


@dataclass(eq=False)
class Watch:
    """One open watch."""

    matches: Callable[[Object | None], bool]
    writer: asyncio.StreamWriter
    lines: asyncio.Queue[Object] = field(default_factory=asyncio.Queue)


class FakeKubeApi:
    """One namespace. ``token``: what a caller must show; None: nothing."""

    def __init__(self, namespace: str = "ns", token: str | None = None) -> None:
        self.namespace = namespace
        self.token = token
        self.asked: list[Asked] = []
        self.list_faults: list[Fault] = []
        self.retry_after_s = 1
        """What goes wrong with the next lists, one each."""
        self.watch_faults: list[Fault] = []
        self.version = FIRST_VERSION
        self.url = ""
        self._objects: dict[str, Object] = {}
        self._history: list[Event] = []
        self._oldest_version = FIRST_VERSION
        self._watches: set[Watch] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._can_speak = asyncio.Event()
        self._can_speak.set()
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0, context: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port or fresh_port(), ssl=context)
        scheme = "https" if context else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """The port is closed and every connection is cut; what is stored stays."""
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    # What a controller does.

    def put(self, one: Object) -> None:
        """The slice is there, as it is given."""
        name = one["metadata"]["name"]
        before = self._objects.get(name)
        self.version += 1
        metadata = {**one["metadata"], "namespace": self.namespace, "resourceVersion": str(self.version)}
        kind = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
        self._objects[name] = {**kind, **one, "metadata": metadata}
        self._changed(Event(self.version, before, self._objects[name]))

    def delete(self, name: str) -> None:
        before = self._objects.pop(name)
        self.version += 1
        self._changed(Event(self.version, before, None))

    def bookmark(self) -> None:
        """Every watch hears of the newest version."""
        for watch in self._watches:
            watch.lines.put_nowait(self._bookmark())

    def _bookmark(self) -> Object:
        metadata = {"resourceVersion": str(self.version), "creationTimestamp": None}
        return {"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": metadata}}

    # What goes wrong.

    def forget_history(self) -> None:
        """Versions before now are too old for a watch."""
        self._history.clear()
        self._oldest_version = self.version

    def cut_watches(self) -> None:
        for watch in self._watches:
            watch.writer.transport.abort()

    def mute(self) -> None:
        """Watches, open ones too, say nothing and never end, as behind a dead link."""
        self._can_speak.clear()

    def unmute(self) -> None:
        self._can_speak.set()

    def _changed(self, event: Event) -> None:
        self._history.append(event)
        for watch in self._watches:
            _tell(watch, event)

    # HTTP.

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve_one(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = await read_head(reader)
        parts = urlsplit(message.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        kind = "watch" if query.get("watch") == "true" else "list"
        self.asked.append(Asked(kind, query, message.headers, asyncio.get_running_loop().time()))
        faults = self.watch_faults if kind == "watch" else self.list_faults
        if parts.path != f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices":
            writer.write(_answer(404, _status(404, "not found")))
        elif self.token is not None and message.headers.get("authorization") != f"Bearer {self.token}":
            writer.write(_answer(401, _status(401, "Unauthorized")))
        elif faults:
            await self._fail(faults.pop(0), writer)
        elif kind == "watch":
            await self._watch(query, reader, writer)
        else:
            writer.write(_answer(200, self._list(_selector(query.get("labelSelector", "")))))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _fail(self, fault: Fault, writer: asyncio.StreamWriter) -> None:
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        bookmark = json.dumps(self._bookmark()).encode() + b"\n"
        half = _answer(200, {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "1"}, "items": []})
        answers = {
            Fault.TOO_MANY: _answer(429, _status(429, "too many requests"), f"retry-after: {self.retry_after_s}\r\n"),
            Fault.ERROR_500: _answer(500, _status(500, "etcd is unwell")),
            Fault.FORBIDDEN: _answer(403, _status(403, "endpointslices is forbidden")),
            Fault.GONE: _answer(410, _status(410, "too old resource version")),
            Fault.CUT: half[:-9],
            Fault.NOT_HTTP: b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
            Fault.NOT_JSON: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\n<html\n\r\n0\r\n\r\n",
            Fault.ENDS_AT_ONCE: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            Fault.ENDS_AFTER_A_LINE: b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(bookmark), bookmark),
        }
        writer.write(answers[fault])

    def _list(self, matches: Callable[[Object | None], bool]) -> Object:
        items = [one for one in self._objects.values() if matches(one)]
        return {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.version)}, "items": items}

    async def _watch(self, query: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        watch = Watch(_selector(query.get("labelSelector", "")), writer)
        since = int(query["resourceVersion"])
        if since < self._oldest_version:
            watch.lines.put_nowait({"type": "ERROR", "object": _status(410, f"too old resource version: {since}")})
        for event in self._history:
            if event.version > since:
                _tell(watch, event)
        self._watches.add(watch)
        end = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds", "3600"))
        hang_up = asyncio.create_task(reader.read(1))
        speaking = asyncio.create_task(self._speak(watch, end))
        try:
            await asyncio.wait({hang_up, speaking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._watches.discard(watch)
            hang_up.cancel()
            speaking.cancel()
            await asyncio.gather(hang_up, speaking, return_exceptions=True)

    async def _speak(self, watch: Watch, end: float) -> None:
        """Each line in two chunks, to say that chunks are not lines."""
        loop = asyncio.get_running_loop()
        is_over = False
        while not is_over:
            line = b""
            try:
                async with asyncio.timeout(max(0.0, end - loop.time())):
                    event = await watch.lines.get()
                line = json.dumps(event).encode() + b"\n"
                is_over = event["type"] == "ERROR"
            except TimeoutError:
                is_over = True
            await self._can_speak.wait()
            for part in (line[:20], line[20:]):
                watch.writer.write(b"%x\r\n%b\r\n" % (len(part), part) if part else b"")
        watch.writer.write(b"0\r\n\r\n")


def _tell(watch: Watch, event: Event) -> None:
    """What a watch with a selector is told: a slice that fits no longer is deleted for it."""
    was, is_ = watch.matches(event.before), watch.matches(event.after)
    if not was and not is_:
        return
    kind = "MODIFIED" if was and is_ else "ADDED" if is_ else "DELETED"
    one = event.after if is_ else event.before  # The API server, too, shows what has gone as it was.
    assert one is not None
    one = {**one, "metadata": {**one["metadata"], "resourceVersion": str(event.version)}}
    watch.lines.put_nowait({"type": kind, "object": one})


def _selector(text: str) -> Callable[[Object | None], bool]:
    """``a=b,c in (d,e)``: the two forms that the router uses."""
    wanted: dict[str, set[str]] = {}
    for term in text.replace("(", "").replace(")", "").replace(",", " ").split("pdcluster.dev/"):
        name, _, values = term.replace("=", " in ").strip().partition(" in ")
        if name:
            wanted["pdcluster.dev/" + name] = set(values.split())

    def matches(one: Object | None) -> bool:
        if one is None:
            return False
        own = one["metadata"].get("labels") or {}
        return all(own.get(name) in values for name, values in wanted.items())

    return matches


def _answer(status: int, body: Object, headers: str = "") -> bytes:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n{headers}\r\n"
    return head.encode() + raw


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


def endpoint(address: str, uid: str = "", **conditions: bool | None) -> Object:
    """One endpoint; conditions that are not given are not there."""
    target = {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}
    return {"addresses": [address], "conditions": conditions, **({"targetRef": target} if uid else {})}


def slice_of(
    name: str,
    role: str,
    *endpoints: Object,
    revision: str | None = "r1",
    cluster: str = "c",
    port: int | None = 8000,
    port_name: str = "http",
    address_type: str = "IPv4",
) -> Object:
    """One EndpointSlice, as the controller makes it from a labelled Service."""
    own = {labels.CLUSTER: cluster, labels.ROLE: role, **({labels.REVISION: revision} if revision is not None else {})}
    return {
        "metadata": {"name": name, "labels": own},
        "addressType": address_type,
        "endpoints": list(endpoints),
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
    }
