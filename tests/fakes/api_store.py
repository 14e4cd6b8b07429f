"""What an API server stores and how it answers writes: versions, preconditions, who owns which field.

Keeps the contract of Kubernetes 1.35's "Server-Side Apply" as far as the operator relies on it; lists are one field
here. ``api_server.py`` puts HTTP around it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

Object = dict[str, Any]
Path = tuple[str, ...]
At = tuple[str, str, str]
"""Plural, namespace, name."""

_UNOWNED: Final = {"apiVersion", "kind"}
_SERVER_METADATA: Final = {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"}


class ApiError(Exception):
    """An answer that is no success, as a Status says it."""

    def __init__(self, code: int, reason: str, message: str, causes: list[dict[str, str]] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
            "details": {"causes": causes or []},
        }


@dataclass
class Change:
    """One entry of the history. ``kind``: ADDED, MODIFIED or DELETED."""

    version: int
    kind: str
    at: At
    before: Object | None
    after: Object


@dataclass
class Stored:
    """An object, and for each of its fields the managers that own it."""

    body: Object
    owners: dict[Path, set[str]] = field(default_factory=dict)


class ApiStore:
    """All objects. ``num_writes`` counts those that changed something."""

    def __init__(self) -> None:
        self.objects: dict[At, Stored] = {}
        self.history: list[Change] = []
        self.version = 100
        self.num_writes = 0
        self._uids = itertools.count(1)

    def copy_of(self, at: At) -> ApiStore:
        """A store with this one object, if it is there, to try something on."""
        copied = ApiStore()
        copied.version = self.version
        copied.objects = {at: copy.deepcopy(self.objects[at])} if at in self.objects else {}
        return copied

    def read(self, at: At) -> Object:
        if at not in self.objects:
            raise ApiError(404, "NotFound", f'{at[0]} "{at[2]}" not found')
        return self.objects[at].body

    def all_of(self, plural: str, namespace: str | None = None) -> list[Object]:
        return [
            one.body
            for at, one in self.objects.items()
            if at[0] == plural and (namespace is None or at[1] == namespace)
        ]

    def create(self, at: At, body: Object, manager: str = "test|Update|") -> Object:
        if at in self.objects:
            raise ApiError(409, "AlreadyExists", f'{at[0]} "{at[2]}" already exists')
        made = self._new(at, body)
        self.objects[at] = Stored(made, {path: {manager} for path, _ in leaves(body)})
        self._record("ADDED", at, None)
        return made

    def update(self, at: At, body: Object, manager: str = "test|Update|") -> Object:
        """The whole object, but for what the server keeps itself."""
        before = self.read(at)
        self._check(before, body.get("metadata", {}))
        kept = {name: value for name, value in before["metadata"].items() if name in _SERVER_METADATA}
        after = {**copy.deepcopy(body), "metadata": {**body.get("metadata", {}), **kept}}
        was, now = dict(leaves(before)), dict(leaves(after))
        owners = self.objects[at].owners
        for path in was.keys() - now.keys():
            owners.pop(path, None)
        for path, value in now.items():
            if was.get(path, _Missing) != value:
                owners[path] = {manager}
        return self._store(at, after)

    def merge(self, at: At, patch: Object, manager: str = "test|Update|") -> Object:
        """RFC 7386."""
        before = self.read(at)
        self._check(before, patch.get("metadata", {}))
        return self.update(at, _merged(before, patch), manager)

    def apply(self, at: At, manifest: Object, manager: str, *, force: bool = False) -> Object:
        metadata = manifest.get("metadata", {})
        stored = self.objects.get(at)
        if stored is None:
            if "uid" in metadata:
                raise ApiError(409, "Conflict", f"uid mismatch: no existing object {at[2]} was found")
            return self.create(at, manifest, manager)
        _refuse_another(stored.body, metadata)
        self._check(stored.body, metadata)
        wanted, live = dict(leaves(manifest)), dict(leaves(stored.body))
        self._refuse_taken(at, stored, wanted, live, manager, force)
        after = copy.deepcopy(stored.body)
        for path, owners in list(stored.owners.items()):
            if manager in owners and path not in wanted:
                owners.discard(manager)
                if not owners:
                    del stored.owners[path]
                    _unset(after, path)
        for path, value in wanted.items():
            if live.get(path, _Missing) != value:
                stored.owners[path] = set()
                _set(after, path, copy.deepcopy(value))
            stored.owners.setdefault(path, set()).add(manager)
        return self._store(at, after)

    def delete(self, at: At, preconditions: Mapping[str, str] = MappingProxyType({})) -> Object:
        body = self.read(at)
        self._check(body, preconditions)
        del self.objects[at]
        self.version += 1
        gone = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        self.num_writes += 1
        self.history.append(Change(self.version, "DELETED", at, body, gone))
        return gone

    def _refuse_taken(
        self, at: At, stored: Stored, wanted: dict[Path, Any], live: dict[Path, Any], manager: str, force: bool
    ) -> None:
        taken = {
            path: stored.owners[path] - {manager}
            for path, value in wanted.items()
            if live.get(path, value) != value and stored.owners.get(path, set()) - {manager}
        }
        if taken and not force:
            causes = [
                {
                    "reason": "FieldManagerConflict",
                    "message": _conflict_with(min(owners)),
                    "field": "." + ".".join(path),
                }
                for path, owners in taken.items()
            ]
            raise ApiError(409, "Conflict", f"Apply failed with {len(causes)} conflicts on {at[2]}", causes)

    def _check(self, body: Object, metadata: Mapping[str, Any]) -> None:
        for name in ("uid", "resourceVersion"):
            if metadata.get(name) not in (None, body["metadata"][name]):
                raise ApiError(409, "Conflict", f"{name} {metadata[name]} is not {body['metadata'][name]}")

    def _new(self, at: At, body: Object) -> Object:
        own = {"uid": f"uid-{next(self._uids)}", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
        named = {"name": at[2], "namespace": at[1]}
        return {**copy.deepcopy(body), "metadata": {**body.get("metadata", {}), **named, **own}}

    def _store(self, at: At, after: Object) -> Object:
        before = self.objects[at].body
        if after == before:
            return before
        if _spec_of(after) != _spec_of(before):
            after["metadata"]["generation"] = before["metadata"]["generation"] + 1
        self.objects[at].body = after
        self._record("MODIFIED", at, before)
        return after

    def _record(self, kind: str, at: At, before: Object | None) -> None:
        self.version += 1
        self.num_writes += 1
        body = self.objects[at].body
        body["metadata"] = {**body["metadata"], "resourceVersion": str(self.version)}
        self.history.append(Change(self.version, kind, at, before, copy.deepcopy(body)))


def owner(manager: str, operation: str, subresource: str = "") -> str:
    """The same manager owns fields apart by each way in which it writes."""
    return f"{manager}|{operation}|{subresource}"


def _conflict_with(name: str) -> str:
    manager, _, subresource = name.split("|")
    return f'conflict with "{manager}"' + (f' with subresource "{subresource}"' if subresource else "")


def _refuse_another(body: Object, metadata: Object) -> None:
    """An apply names the object that it is for; any other way of writing answers 409."""
    if metadata.get("uid") not in (None, body["metadata"]["uid"]):
        causes = [{"reason": "FieldValueInvalid", "message": "field is immutable", "field": "metadata.uid"}]
        raise ApiError(422, "Invalid", f"metadata.uid: Invalid value: {metadata['uid']}", causes)


class _Missing:
    """Equal to no value."""


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every field that somebody can own, and its value."""
    is_the_servers = path[:1] == ("metadata",) and path[1:2] and path[1] in _SERVER_METADATA
    if is_the_servers or (path and path[0] in _UNOWNED):
        return
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif path:
        yield path, value


def _spec_of(body: Object) -> Object:
    return {name: value for name, value in body.items() if name not in ("metadata", "status")}


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


def _set(body: Object, path: Path, value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(body.get(name), dict):
            body[name] = {}
        body = body[name]
    body[path[-1]] = value


def _unset(body: Object, path: Path) -> None:
    for name in path[:-1]:
        body = body.get(name, {})
    body.pop(path[-1], None)
