"""The routers of a pool, asked about a request: by URL, or on Kubernetes each pod through the API server's proxy.

Each router remembers its own requests only, so all are asked. A router that does not answer is named, and the others
count.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

import msgspec

from pdcluster_protocol import labels
from pdcluster_protocol.errors import ConfigError, Unavailable
from pdcluster_protocol.kept import KeptAnswer, path_for
from pdcluster_protocol.launch import INTERNAL_PORT

if TYPE_CHECKING:
    from pdcluster_kube.reader import KubeReader

_ASK_S: Final = 10.0
_ROUTER: Final = "router"
Answers = dict[str, KeptAnswer | str]
"""By source: what it says, or why it says nothing."""


class Unanswered(Exception):
    """There is no router to ask. The message says why, and what to do."""


def ask_urls(urls: list[str], name: str) -> Answers:
    """The answers of the routers with these internal ports, one after the other. Waits at most 10 s for each."""
    return {url: _ask_url(url, name) for url in urls}


def _ask_url(url: str, name: str) -> KeptAnswer | str:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or INTERNAL_PORT, timeout=_ASK_S)
        connection.request("GET", path_for(name))
        response = connection.getresponse()
        return _read(response.status, response.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no answer: {error or type(error).__name__}: is this a router's internal port?"


def _read(status: int, body: bytes) -> KeptAnswer | str:
    if status != 200:
        return f"it answered {status}: is this the internal port of a router of this version?"
    try:
        return msgspec.json.decode(body, type=KeptAnswer)
    except msgspec.DecodeError as error:
        return f"its answer cannot be read ({error}): is it a router of this version?"


def ask_cluster(cluster: str, given: argparse.Namespace, name: str) -> Answers:
    """The answers of all router pods of this PDCluster. ``given``: as ``documents.where_of`` reads it.

    Raises:
        Unanswered: The API server does not say which pods there are, or there are none.
    """
    try:
        return asyncio.run(_ask_pods(cluster, given, name))
    except (ConfigError, Unavailable, OSError) as error:
        raise Unanswered(str(error)) from error


async def _ask_pods(cluster: str, given: argparse.Namespace, name: str) -> Answers:
    from pdcluster_cli.documents import find_access, where_of
    from pdcluster_kube.reader import KubeReader

    where = where_of(given)
    access, own = await find_access(where)
    pods_path = f"/api/v1/namespaces/{quote(where.namespace or own)}/pods"
    reader = KubeReader(access, timeout_s=_ASK_S, user_agent="pdcluster")
    pods = await _router_pods(reader, pods_path, cluster)
    if not pods:
        raise Unanswered(f"no router pods of PDCluster {where.namespace or own}/{cluster}: are its name and -n right?")
    paths = [f"{pods_path}/{quote(pod)}:{INTERNAL_PORT}/proxy{path_for(name)}" for pod in pods]
    answers = await asyncio.gather(*(_ask_pod(reader, path) for path in paths))
    return dict(zip(pods, answers, strict=True))


async def _router_pods(reader: KubeReader, pods_path: str, cluster: str) -> list[str]:
    from pdcluster_operator.core.names import cluster_label

    selector = quote(f"{labels.CLUSTER}={cluster_label(cluster)},{labels.COMPONENT}={_ROUTER}")
    try:
        listed = msgspec.json.decode(await reader.read(f"{pods_path}?labelSelector={selector}"), type=_Pods)
    except msgspec.DecodeError as error:
        raise Unanswered(f"the API server's list of pods cannot be read: {error}") from error
    return sorted(pod.metadata.name for pod in listed.items)


async def _ask_pod(reader: KubeReader, path: str) -> KeptAnswer | str:
    try:
        return _read(200, await reader.read(path))
    except Unavailable as error:
        cure = "your account needs `get` on `pods/proxy`, and network policies must let the API server in"
        return f"{error} ({cure}; else `kubectl port-forward` to port {INTERNAL_PORT}, and --url)"


class _Metadata(msgspec.Struct):
    name: str


class _Pod(msgspec.Struct):
    metadata: _Metadata


class _Pods(msgspec.Struct):
    items: list[_Pod]
