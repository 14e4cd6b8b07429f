"""Lays a user's part of a pod template over the operator's, as ``kubectl patch`` does (strategic merge).

Source of truth: the ``patchStrategy`` and ``patchMergeKey`` tags of Kubernetes 1.35 ``core/v1``, from PodTemplateSpec
down. Maps merge key by key, null removes a key, and these lists merge item by item, by the key beside them:

    containers, initContainers, ephemeralContainers, volumes, imagePullSecrets, schedulingGates, resourceClaims   name
    hostAliases                                                                                                     ip
    topologySpreadConstraints                                                                              topologyKey
    of a container:  env  name      ports  containerPort      volumeMounts  mountPath      volumeDevices    devicePath
    of metadata:     ownerReferences  uid;  finalizers: both lists together

All other lists are replaced whole: command, args, envFrom, tolerations, affinity terms, supplementalGroups.
An item, or a map, may say ``$patch: delete`` or ``$patch: replace``. A volume or a resource claim has one source. So a
user's item of ``volumes`` or ``resourceClaims`` replaces ours as a whole (``patchStrategy: merge,retainKeys``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdcluster_operator.core.manifests.pool import Document
from pdcluster_protocol.errors import ConfigError

_DIRECTIVE: Final = "$patch"


@dataclass(frozen=True, slots=True)
class _List:
    """How one list merges. ``key``: field that names an item. ``is_whole``: the user's item replaces ours."""

    key: str
    is_whole: bool = False


_POD: Final[Mapping[str, _List]] = {
    "containers": _List("name"),
    "initContainers": _List("name"),
    "ephemeralContainers": _List("name"),
    "volumes": _List("name", is_whole=True),
    "imagePullSecrets": _List("name"),
    "schedulingGates": _List("name"),
    "resourceClaims": _List("name", is_whole=True),
    "hostAliases": _List("ip"),
    "topologySpreadConstraints": _List("topologyKey"),
}
_CONTAINER: Final[Mapping[str, _List]] = {
    "env": _List("name"),
    "ports": _List("containerPort"),
    "volumeMounts": _List("mountPath"),
    "volumeDevices": _List("devicePath"),
}
_CONTAINERS: Final = frozenset({"containers", "initContainers", "ephemeralContainers"})
_LISTS: Final[Mapping[tuple[str, ...], Mapping[str, _List]]] = {
    ("spec",): _POD,
    **{("spec", name): _CONTAINER for name in _CONTAINERS},
    ("metadata",): {"ownerReferences": _List("uid")},
}
"""The lists that merge, by the path of the map that they are in. Items' keys are not part of the path."""
_UNITED: Final = frozenset({("metadata", "finalizers")})


def merge_template(template: Mapping[str, Any], patch: Mapping[str, Any] | None) -> Document:
    """The pod template with ``patch`` laid over it.

    Raises:
        ConfigError: ``patch`` cannot be merged: an item lacks the key by which its list merges, a directive is
            unknown, or a value is no map or list where the template has one.
    """
    return _merge_map(template, patch or {}, ())


def _merge_map(base: Mapping[str, Any], patch: Mapping[str, Any], path: tuple[str, ...]) -> Document:
    if _directive(patch, path) == "replace":
        return _plain(patch, path)
    gone = {name for name, value in patch.items() if value is None or _is_deleted(value)}
    merged = {name: value for name, value in base.items() if name not in gone}
    for name, value in patch.items():
        if name not in gone and name != _DIRECTIVE:
            merged[name] = _merge_value(base.get(name), value, (*path, name))
    return merged


def _merge_value(base: object, patch: object, path: tuple[str, ...]) -> object:
    for kind, shape in ((Mapping, "map"), (list, "list")):
        if isinstance(base, kind) and not isinstance(patch, kind):
            raise ConfigError(f"podOverrides.{'.'.join(path)} is {json.dumps(patch)}: give a {shape}")
    if isinstance(patch, Mapping):
        return _merge_map(base if isinstance(base, Mapping) else {}, patch, path)
    if not isinstance(patch, list):
        return patch
    ours = base if isinstance(base, list) else []
    if path in _UNITED:
        return [*ours, *(item for item in patch if item not in ours)]
    merging = _LISTS.get(path[:-1], {}).get(path[-1])
    return _merge_list(ours, patch, merging, path) if merging else patch


def _merge_list(base: Sequence[Any], patch: Sequence[Any], how: _List, path: tuple[str, ...]) -> list[Any]:
    """The merged list: items of ``base`` keep their place, and new items come after them."""
    merged = {item[how.key]: item for item in base}
    for item in patch:
        key = _key_of(item, how, path)
        if _is_deleted(item):
            merged.pop(key, None)
        elif how.is_whole or _directive(item, path) == "replace":
            merged[key] = _plain(item, path)
        else:
            merged[key] = _merge_map(merged.get(key, {}), item, path)
    return list(merged.values())


def _is_deleted(value: object) -> bool:
    return isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"


def _key_of(item: object, how: _List, path: tuple[str, ...]) -> object:
    key = item.get(how.key) if isinstance(item, Mapping) else None
    if not isinstance(key, str | int):
        raise ConfigError(
            f"podOverrides.{'.'.join(path)} has an item without {how.key}, by which this list is merged: give it one"
        )
    return key


def _directive(patch: Mapping[str, Any], path: tuple[str, ...]) -> str:
    found = patch.get(_DIRECTIVE, "merge")
    if found not in ("merge", "replace", "delete"):
        raise ConfigError(f"{'.'.join(('podOverrides', *path))} says $patch: {found}: use replace, delete or merge")
    return str(found)


def _plain(patch: Mapping[str, Any], path: tuple[str, ...]) -> Document:
    """The patch alone, without its nulls and directives."""
    return _merge_map({}, {name: value for name, value in patch.items() if name != _DIRECTIVE}, path)
