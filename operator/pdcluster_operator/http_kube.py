"""The operator's calls to the API server. A write to an object that was seen names its uid, its version, or both.

Paths are in ``kinds.py``, the meaning of status codes in ``core/answers.py``. Every call has a deadline and raises a
``KubeError`` unless it was surely done (``errors.py`` says what helps). A client with a fence writes only while we
lead. If an answer is lost, the server may have done the call, so each call is safe to repeat. A call that ends in
``ApiUnavailable`` is tried again before its deadline.

Source of truth: Kubernetes 1.35, "API concepts", "Server-Side Apply".
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlencode

import aiohttp

from pdcluster_kube.backoff import Backoff
from pdcluster_kube.documents import decode_document
from pdcluster_operator.core.answers import error_of
from pdcluster_operator.errors import ApiUnavailable, NotFound, NotLeader, OwnConflict
from pdcluster_operator.kinds import Kind, Object, Ref, ref_of, selector_of
from pdcluster_protocol.labels import MANAGER

MAX_TRIES: Final = 4
BACKOFF: Final = Backoff(first_s=0.1, most_s=5.0)
PAGE_OBJECTS: Final = 500
_JSON: Final = "application/json"
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_STRICT: Final = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
"""Unknown fields are errors, so the server refuses a misspelled pod override instead of ignoring it."""
_DRY: Final = {**_STRICT, "dryRun": "All"}
_FORCE: Final = {"force": "true"}


@dataclass(frozen=True, slots=True)
class Listed:
    """An object's metadata, as a list shows it."""

    uid: str
    namespace: str
    name: str
    resource_version: str


class Fence(Protocol):
    """Says for how long we may write."""

    def left_s(self) -> float:
        """Seconds for which we may write; 0 or less: we may not."""
        ...


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request. ``verb``: as the rules of a Kubernetes Role name it."""

    verb: str
    kind: Kind
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Object | None = None
    content_type: str = _JSON
    accept: str = _JSON
    subresource: str = ""

    @property
    def is_write(self) -> bool:
        return self.method != "GET"

    @property
    def what(self) -> str:
        return f"{self.method} {self.path}"


OnAnswer = Callable[[ApiCall, int], None]
"""Called after each try of a call, with the status of its answer; 0: there was no answer."""


class HttpKube:
    """Calls to one API server, through a session that the caller closes. Any number of tasks may use it.

    ``fence``: None if writes need no leadership, like the writes of the Lease itself.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        timeout_s: float,
        fence: Fence | None,
        on_answer: OnAnswer | None = None,
    ) -> None:
        """``timeout_s``: seconds for a call with all its tries."""
        self._session = session
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._fence = fence
        self._on_answer = on_answer or _ignore

    async def get(self, ref: Ref) -> Object | None:
        """The object; None when there is none."""
        try:
            return await self._do(ApiCall("get", ref.kind, "GET", ref.path()))
        except NotFound:
            return None

    async def list_metadata(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Listed]:
        """All objects of a kind that a label selector chooses, in a namespace or (None) in the cluster."""
        found: list[Listed] = []
        query = {"limit": str(PAGE_OBJECTS)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._do(ApiCall("list", kind, "GET", kind.path(namespace), query, accept=_METADATA_ONLY))
            found += [_listed(item["metadata"]) for item in page.get("items") or ()]
            token = page.get("metadata", {}).get("continue")
            if not token:
                return found
            if token == query.get("continue"):
                raise ApiUnavailable(f"GET {kind.path(namespace)}: the next page of the list is the same one again")
            query = {**query, "continue": token}

    async def require_list(self, kind: Kind, namespace: str) -> None:
        """Ask for one object of a kind.

        Raises:
            Forbidden: We may not list them.
        """
        query = {"limit": "1"} | ({"labelSelector": selector} if (selector := selector_of(kind)) else {})
        await self._do(ApiCall("list", kind, "GET", kind.path(namespace), query, accept=_METADATA_ONLY))

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows this kind."""
        try:
            known = await self._do(ApiCall("get", kind, "GET", kind.root))
        except NotFound:
            return False
        return any(one.get("name") == kind.plural for one in known.get("resources") or ())

    async def create(self, manifest: Object) -> Object:
        """Create the object, and return it as stored.

        Raises:
            Exists: There is one of this name.
        """
        return await self._do(_create_call(manifest, _STRICT))

    async def ask_create(self, manifest: Object) -> None:
        """Ask whether the API server would create the object now: a dry run with admission and all checks.

        Raises:
            Exists: There is one of this name.
        """
        await self._do(_create_call(manifest, _DRY))

    async def ask_apply(self, manifest: Object) -> None:
        """Ask whether the API server would apply the manifest now, by force: a dry run.

        Raises:
            Conflict: The preconditions do not hold.
        """
        await self._do(_apply_call(manifest, {**_DRY, **_FORCE}))

    async def apply(self, manifest: Object, *, is_forced: bool = False) -> Object:
        """Give the object the fields of the manifest (server-side apply), and return it as stored.

        ``metadata.uid`` and ``metadata.resourceVersion``, where the manifest has them, are preconditions.
        ``is_forced``: also change fields that somebody else owns; the manifest must have the uid of an object of ours.

        Raises:
            Conflict: The preconditions do not hold, or the manifest has no resourceVersion and differs from what we
                ourselves created or scaled.
            Taken: Somebody else owns a field that differs, and the apply is not forced.
        """
        if is_forced:
            return await self._do(_apply_call(manifest, {**_STRICT, **_FORCE}))
        call = _apply_call(manifest, _STRICT)
        try:
            return await self._do(call)
        except OwnConflict:
            # Only our own create or scale owns the field. With a resourceVersion our picture is surely new: force it.
            if "resourceVersion" not in manifest["metadata"]:
                raise
            return await self._do(dataclasses.replace(call, query={**_STRICT, **_FORCE}))

    async def apply_status(self, ref: Ref, uid: str, status: Object, *, resource_version: str) -> Object:
        """Set the object's status. A field of ours that ``status`` does not have is removed. Returns the whole object.

        The apply is forced, because status has no other writer.

        ``resource_version``: of the state that the status was made from. A call that arrives late, when another replica
        leads, must not write an old status over a newer one.

        Raises:
            Conflict: The object has changed since, or another object has its name.
        """
        named = {"name": ref.name, "namespace": ref.namespace, "uid": uid, "resourceVersion": resource_version}
        manifest = {"apiVersion": ref.kind.api_version, "kind": ref.kind.name, "metadata": named, "status": status}
        query = {**_STRICT, **_FORCE}
        path = ref.path("status")
        return await self._do(ApiCall("patch", ref.kind, "PATCH", path, query, manifest, _APPLY, subresource="status"))

    async def replace(self, manifest: Object) -> Object:
        """Replace the whole object, if the manifest's ``metadata.resourceVersion`` is still the newest.

        Raises:
            Conflict: The object has changed since.
        """
        ref = ref_of(manifest)
        return await self._do(ApiCall("update", ref.kind, "PUT", ref.path(), _STRICT, manifest))

    async def scale(self, ref: Ref, replicas: int, *, resource_version: str) -> str:
        """Set ``spec.replicas``, if the object has not changed since. Returns its new resourceVersion.

        Raises:
            Conflict: The object has changed.
        """
        body = {"metadata": {"resourceVersion": resource_version}, "spec": {"replicas": replicas}}
        query, path = {"fieldManager": MANAGER}, ref.path("scale")
        scaled = await self._do(ApiCall("patch", ref.kind, "PATCH", path, query, body, _MERGE, subresource="scale"))
        return str(scaled["metadata"]["resourceVersion"])

    async def delete(self, ref: Ref, *, uid: str, resource_version: str = "") -> None:
        """Delete the object, if it still has this uid. It is no error if there is no object of this name.

        ``resource_version``: delete it only in this state; empty: in any.

        Raises:
            Conflict: Another object has its name, or the object has changed since.
        """
        preconditions = {"uid": uid} | ({"resourceVersion": resource_version} if resource_version else {})
        # Background: the object goes at once, its own children soon after.
        body = {"preconditions": preconditions, "propagationPolicy": "Background"}
        try:
            await self._do(ApiCall("delete", ref.kind, "DELETE", ref.path(), {}, body))
        except NotFound:
            return

    async def _do(self, call: ApiCall) -> dict[str, Any]:
        """The answer, after at most ``MAX_TRIES`` tries, or fewer if the time is over first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        for num_tries in itertools.count(1):
            try:
                return await self._try(call, deadline)
            except ApiUnavailable as error:
                chance = random.random()  # noqa: S311 - spreads load
                pause = BACKOFF.pause_s(num_tries, chance, asked_s=error.retry_after_s)
                if num_tries == MAX_TRIES or loop.time() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _try(self, call: ApiCall, deadline: float) -> dict[str, Any]:
        status = 0
        try:
            async with asyncio.timeout_at(self._limit(call, deadline)):
                async with self._request(call) as response:
                    raw = await response.read()
                    status = response.status
            return _read_answer(call, status, raw, response.headers)
        except TimeoutError as error:
            raise ApiUnavailable(f"{call.what}: no answer in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiUnavailable(f"{call.what}: {error}") from error
        finally:
            self._on_answer(call, status)

    def _limit(self, call: ApiCall, deadline: float) -> float:
        """The event loop's time at which this try must end. A write must end before our leadership does.

        Raises:
            NotLeader: We do not lead.
        """
        if not call.is_write or self._fence is None:
            return deadline
        left_s = self._fence.left_s()
        if left_s <= 0:
            raise NotLeader(f"{call.what}: not sent, for another operator may lead now")
        return min(deadline, asyncio.get_running_loop().time() + left_s)

    def _request(self, call: ApiCall) -> aiohttp.client._RequestContextManager:
        path = f"{call.path}?{urlencode(call.query)}" if call.query else call.path
        headers = {"Accept": call.accept} | ({"Content-Type": call.content_type} if call.body is not None else {})
        data = None if call.body is None else json.dumps(call.body).encode()
        return self._session.request(
            call.method, self._url + path, data=data, headers=headers, allow_redirects=False,
            timeout=aiohttp.ClientTimeout(),
        )  # fmt: skip


def _create_call(manifest: Object, query: Mapping[str, str]) -> ApiCall:
    ref = ref_of(manifest)
    return ApiCall("create", ref.kind, "POST", ref.kind.path(ref.namespace), query, manifest)


def _apply_call(manifest: Object, query: Mapping[str, str]) -> ApiCall:
    ref = ref_of(manifest)
    return ApiCall("patch", ref.kind, "PATCH", ref.path(), query, manifest, _APPLY)


def _read_answer(call: ApiCall, status: int, raw: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        parsed = decode_document(raw)
    except ValueError:
        parsed = None
    body: dict[str, Any] | None = parsed if isinstance(parsed, dict) else None
    if status >= 300 or body is None:
        raise error_of(call.what, status, body, raw, headers.get("Retry-After", ""))
    return body


def _listed(metadata: Object) -> Listed:
    namespace = metadata.get("namespace", "")
    return Listed(metadata["uid"], namespace, metadata["name"], metadata["resourceVersion"])


def _ignore(call: ApiCall, status: int) -> None:
    pass
