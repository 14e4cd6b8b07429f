"""PDClusters for ``pdcluster explain`` and ``pdcluster plan``: from a file, from standard input, or by kubectl.

kubectl is asked for what is in a cluster, so that the user's own context, credentials and rights count.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from pdcluster_operator.api.cluster import PDCluster

KIND: Final = "PDCluster"
_KUBECTL_S: Final = 30.0
"""Longer than kubectl itself tries to reach an API server that does not answer."""

_KLOG: Final = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d")
"""How a line of Kubernetes' log begins: ``E1121 21:18:53.807144   32448 memcache.go:265] ...``."""

Document = Mapping[str, Any]
_NUMBERS: Final = {
    "tag:yaml.org,2002:int": (
        r"[-+]?(?:0b_*[01][01_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0o_*[0-7][0-7_]*|0[0-7_]*|[1-9][0-9_]*)$"
    ),
    "tag:yaml.org,2002:float": r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$",
}
"""The first that matches counts."""
_NOT_YAML: Final = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises. The others: for bytes that are no text, tags whose values do not fit, nesting without end."""
_NOT_JSON: Final = {*_NUMBERS, "tag:yaml.org,2002:timestamp"}


class _Loader(yaml.SafeLoader):
    """Scalars as kubectl takes them, which makes JSON of YAML: dates, and numbers to base 60 like 22:30, are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # as the class above has it
        first: [(tag, pattern) for tag, pattern in known if tag not in _NOT_JSON]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+0123456789."))


class Unreadable(Exception):
    """There is no PDCluster where it was looked for. The message says why and what to do."""


def read_file(path: str) -> Document:
    """The one PDCluster of a YAML or JSON file, whatever else is in it; ``-`` is standard input.

    Raises:
        Unreadable: There is none, or several, or it has no name, or the file is not readable.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        documents = yaml.load_all(text, _Loader)
        found = [one for one in documents if isinstance(one, dict) and one.get("kind") == KIND]
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from error
    except _NOT_YAML as error:
        raise Unreadable(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not found:
        raise Unreadable(f"{path} has no object of kind {KIND}")
    if len(found) > 1:
        raise Unreadable(f"{path} has {len(found)} objects of kind {KIND}: give them one at a time")
    _require_name(path, found[0])
    return _as_json(path, found[0])


def _as_json(path: str, document: Document) -> Document:
    """Its keys are text, and 1.0 is 1."""
    try:
        return dict(json.loads(json.dumps(document, allow_nan=False), parse_float=_number))
    except (TypeError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path} has what JSON cannot say: {error}") from error


def _number(text: str) -> int | float:
    found = float(text)
    return int(found) if found.is_integer() else found


def _require_name(path: str, document: Document) -> None:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise Unreadable(f"{path} has a {KIND} without a name: give it metadata.name")


def ask_kubectl(name: str, namespace: str | None) -> Document:
    """The PDCluster as the API server has it. Waits, at most 30 s.

    Raises:
        Unreadable: kubectl is missing, or says why it has none.
    """
    return dict(json.loads(_get(name, namespace)))


def find_with_kubectl(name: str, namespace: str | None) -> Document | None:
    """As ``ask_kubectl``; None when the API server has none of this name."""
    told = _get(name, namespace, "--ignore-not-found")
    return dict(json.loads(told)) if told.strip() else None


def _get(name: str, namespace: str | None, *more: str) -> str:
    command = ["kubectl", "get", "pdclusters.pdcluster.dev", name, "--output=json", *more]
    command += [f"--namespace={namespace}"] if namespace else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_KUBECTL_S)  # noqa: S603  # no shell
    except FileNotFoundError as error:
        raise Unreadable("kubectl is not installed: install it, or give what it would print with -f") from error
    except subprocess.TimeoutExpired as error:
        raise Unreadable(f"kubectl gave no answer within {_KUBECTL_S:.0f} s: is the API server there?") from error
    if done.returncode:
        raise Unreadable(_said_to_people(done.stderr) or f"kubectl ended with status {done.returncode}")
    return done.stdout


def _said_to_people(stderr: str) -> str:
    """Without kubectl's log of its own tries, which is several lines for one API server that is not there."""
    lines = (line for line in stderr.splitlines() if not _KLOG.match(line))
    return "\n".join(lines).strip() or stderr.strip()


def parse_cluster(document: Document, *, is_stored: bool = False) -> PDCluster:
    """What a user wants. Types and bounds are checked here; how fields fit together only the API server checks.

    ``is_stored``: it comes from the API server, whose CRD may be newer than we are; what only that knows is left out.

    Raises:
        Unreadable: A field is missing or out of bounds, or in a file unknown; all of them are named.
    """
    metadata = {"namespace": "default", **document.get("metadata", {})}
    whole = {**document, "metadata": metadata}
    try:
        return PDCluster.from_server(whole)[0] if is_stored else PDCluster.from_wire(whole)
    except ValidationError as error:
        told = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise Unreadable("; ".join(told)) from error
