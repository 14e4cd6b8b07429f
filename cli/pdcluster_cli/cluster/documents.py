"""Reads PDClusters for ``pdcluster explain`` and ``plan``: from a file, from standard input, or from a cluster.

The cluster is the one that kubectl would ask, with the user's own context, credentials and rights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml
from pydantic import ValidationError

from pdcluster_cli.cluster.event_loop import run
from pdcluster_kube.access import ApiAccess, read_pod
from pdcluster_kube.documents import decode_document
from pdcluster_kube.kubeconfig import has_kubeconfig, read_kubeconfig
from pdcluster_kube.reader import ApiStatusError, KubeReader
from pdcluster_operator.api.base import API_VERSION, faults_in
from pdcluster_operator.api.cluster import PDCluster, metadata_problems
from pdcluster_operator.core.seen.problems import printable
from pdcluster_operator.kinds import EVENT, PDCLUSTER, Ref
from pdcluster_protocol.errors import ConfigError, Unavailable

KIND: Final = "PDCluster"
_CALL_S: Final = 30.0
_OTHER_SERVER: Final = "is this the API server you mean, and is it up? --context and --kubeconfig name another one"

YamlDocument = Mapping[str, Any]
_NUMBERS: Final = {
    "tag:yaml.org,2002:int": (
        r"[-+]?(?:0b_*[01][01_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0o_*[0-7][0-7_]*|0[0-7_]*|[1-9][0-9_]*)$"
    ),
    "tag:yaml.org,2002:float": r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$",
}
"""Patterns of numbers by YAML tag. The first that matches counts."""
_NOT_YAML: Final = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""Errors that PyYAML raises, also for bytes that are no text, values that do not fit their tags, or deep nesting."""
_MAX_VALUES: Final = 100_000
"""Of a PDCluster, which has a few hundred. A file of some lines can stand for more than memory holds: by aliases."""
_TEXT: Final = 100
"""Characters of a text that count as a value."""
_NOT_JSON: Final = {*_NUMBERS, "tag:yaml.org,2002:timestamp"}


class _Loader(yaml.SafeLoader):
    """Reads scalars as kubectl does, which turns YAML into JSON: dates, and numbers to base 60 like 22:30, are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # as the class above has it
        first: [(tag, pattern) for tag, pattern in known if tag not in _NOT_JSON]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merges ``<<`` into the mapping. Merges of merges grow as aliases do, and are written out here already."""
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:
            raise yaml.constructor.ConstructorError(problem=f"it merges more than {_MAX_VALUES} keys")


for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+0123456789."))


class Unreadable(Exception):
    """A PDCluster cannot be read. The message says why and what to do."""


def read_file(path: str) -> YamlDocument:
    """The one PDCluster in a YAML or JSON file, which may hold objects of other kinds too; ``-`` is standard input.

    Raises:
        Unreadable: The file has no PDCluster, several, or one whose name the API server refuses; or it cannot be read.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        documents = [one for document in yaml.load_all(text, _Loader) for one in _objects_in(document)]
        found = [one for one in documents if isinstance(one, dict) and one.get("kind") == KIND]
        num_values = _num_values(found[0], {}) if len(found) == 1 else 0
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from error
    except _NOT_YAML as error:
        raise Unreadable(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if num_values > _MAX_VALUES:
        raise Unreadable(f"{path} has more than {_MAX_VALUES} values, its aliases written out: write it without them")
    if not found:
        raise Unreadable(f"{path} has no object of kind {KIND}")
    if len(found) > 1:
        raise Unreadable(f"{path} has {len(found)} objects of kind {KIND}: give them one at a time")
    _check_metadata(path, found[0])
    return _as_json(path, found[0])


def _objects_in(document: Any) -> list[Any]:
    """The objects of a list, as ``kubectl get`` without a name prints one; else the document itself."""
    items = document.get("items") if isinstance(document, dict) else None
    return items if isinstance(items, list) else [document]


def _num_values(value: Any, known: dict[int, int]) -> int:
    """The number of values, each alias counted with all that it stands for, a long text as several. ``known``: by
    identity."""
    if not isinstance(value, dict | list):
        return 1 + len(value) // _TEXT if isinstance(value, str) else 1
    if id(value) not in known:
        known[id(value)] = 0  # An alias within what it stands for: JSON refuses that later.
        known[id(value)] = 1 + sum(
            _num_values(one, known) for one in (value.values() if isinstance(value, dict) else value)
        )
    return known[id(value)]


def _as_json(path: str, document: YamlDocument) -> YamlDocument:
    """The document, written as JSON and read again: keys are text, and 1.0 is 1.

    Raises:
        Unreadable: It holds a value that JSON cannot express."""
    try:
        return dict(json.loads(json.dumps(document, allow_nan=False), parse_float=_number))
    except (TypeError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path} has what JSON cannot say: {error}") from error


def _number(text: str) -> int | float:
    found = float(text)
    return int(found) if found.is_integer() else found


def _check_metadata(path: str, document: YamlDocument) -> None:
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("name") in (None, ""):
        raise Unreadable(f"{path} has a {KIND} without a name: give it metadata.name")
    if problems := metadata_problems(metadata):
        raise Unreadable(f"{path}: {'; '.join(problems)}")
    if not isinstance(generation := metadata.get("generation", 0), int):
        raise Unreadable(f"{path}: metadata.generation is {generation}, and a whole number is wanted: leave it out")
    if (version := document.get("apiVersion", API_VERSION)) != API_VERSION:
        cure = f"use the pdcluster that knows {version}, or write the other"
        raise Unreadable(f"{path} has apiVersion {version}, and this pdcluster reads {API_VERSION}: {cure}")


@dataclass(frozen=True, slots=True)
class Where:
    """Cluster and namespace in which to look. None: the ones that kubectl would use."""

    namespace: str | None = None
    kubeconfig: str | None = None
    context: str | None = None


def where_of(given: argparse.Namespace) -> Where:
    return Where(getattr(given, "namespace", None), given.kubeconfig, given.context)


def read_cluster(name: str, where: Where) -> YamlDocument:
    """The PDCluster as the API server has it. Waits at most 30 s, and at most 60 s more for a log-in.

    Raises:
        Unreadable: The API server cannot be reached, or does not give the object.
    """
    if "/" in name or not name:
        raise Unreadable(f"{name!r} is no name: give it without a kind, and its namespace with -n")
    return _read(where, lambda namespace: Ref(PDCLUSTER, namespace, name).path())


def read_events(document: YamlDocument, where: Where) -> list[tuple[str, str]]:
    """Reason and message of each Event about a PDCluster of the API server, oldest first. Waits as ``read_cluster``.

    Anyone who may write Events wrote these: a message is one line, and steers no terminal.

    Raises:
        Unreadable: The API server does not give them.
    """
    about = quote(f"involvedObject.uid={document.get('metadata', {}).get('uid', '')}")
    found = _read(where, lambda namespace: f"{EVENT.path(namespace)}?fieldSelector={about}")
    events = sorted(found.get("items", ()), key=lambda one: one.get("lastTimestamp") or "")
    return [(one.get("reason", ""), printable(one.get("message", ""))) for one in events]


def _read(where: Where, path_in: Callable[[str], str]) -> YamlDocument:
    try:
        return run(_get(where, path_in))
    except ApiStatusError as error:
        cure = ": are pdcluster's CRDs installed?" if error.status == 404 and not error.reason else ""
        raise Unreadable(f"{error}{cure}") from error
    except (ConfigError, Unavailable, OSError) as error:
        raise Unreadable(no_way_because(error)) from error


def no_way_because(error: Exception) -> str:
    """Why an API server could not be asked, and what to do."""
    is_silent = isinstance(error, Unavailable) and not isinstance(error, ApiStatusError)
    return f"{error}: {_OTHER_SERVER}" if is_silent else str(error)


def find_cluster(name: str, where: Where) -> YamlDocument | None:
    """As ``read_cluster``; None: the API server has no PDCluster of this name."""
    try:
        return read_cluster(name, where)
    except Unreadable as error:
        if isinstance(error.__cause__, ApiStatusError) and error.__cause__.reason == "NotFound":
            return None
        raise


async def _get(where: Where, path_in: Callable[[str], str]) -> YamlDocument:
    """The object at the path that ``path_in`` makes of the namespace."""
    access, namespace = await find_access(where)
    reader = KubeReader(access, timeout_s=_CALL_S, user_agent="pdcluster")
    answer = await reader.read(path_in(where.namespace or namespace))
    try:
        found = decode_document(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unreadable("the API server's answer is no object")
    return found


async def find_access(where: Where) -> tuple[ApiAccess, str]:
    """The API server, and the namespace if the user names none. As for kubectl, a pod's own API server comes last.

    Raises:
        ConfigError: There is no kubeconfig, or it cannot be used.
    """
    pod = read_pod(os.environ)
    if pod.access and not (where.kubeconfig or where.context or has_kubeconfig()):
        return pod.access, pod.namespace or "default"
    found = await read_kubeconfig(where.kubeconfig, where.context)
    return found, found.namespace


def parse_cluster(document: YamlDocument, source: str, *, is_stored: bool = False) -> PDCluster:
    """The user's PDCluster. Checks types and bounds; only the API server checks how fields fit together.

    ``source``: the file, or who else gave the document, for error messages. ``is_stored``: the document comes from the
    API server, whose CRD may be newer than this program. Fields that only that CRD has are left out.

    Raises:
        Unreadable: Fields are missing, out of bounds, or (in a file) unknown. The message names them all.
    """
    metadata = {"namespace": "default", **document.get("metadata", {})}
    whole = {**document, "metadata": metadata}
    try:
        return PDCluster.from_server(whole)[0] if is_stored else PDCluster.from_wire(whole)
    except ValidationError as error:
        raise Unreadable(f"{source}: {'; '.join(faults_in(error))}") from error
