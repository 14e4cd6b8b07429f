"""The routers of a pool, asked at their internal ports: by URL, or each pod through the API server's proxy.

Each router knows its own requests only, so all are asked. A router that does not answer is named, and the others count.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from pdcluster_protocol import labels
from pdcluster_protocol.errors import ConfigError, Unavailable
from pdcluster_protocol.launch import INTERNAL_PORT

if TYPE_CHECKING:
    from pdcluster_kube.reader import KubeReader

DEFAULT_URL: Final = f"http://127.0.0.1:{INTERNAL_PORT}"
"""The internal port of ``pdcluster local``."""
_ASK_S: Final = 10.0
_ROUTER: Final = "router"
Answers = dict[str, bytes | str]
"""By router: the body of its answer, or why there is none."""


class Unanswered(Exception):
    """There is no router to ask. The message says why, and what to do."""


def add_router_flags(parser: argparse.ArgumentParser) -> Any:
    """``ask_routers`` reads them. Gives the group of those that exclude each other."""
    which = parser.add_mutually_exclusive_group()
    told = f"of a router's internal port; repeat it for more (default: {DEFAULT_URL})"
    which.add_argument("--url", action="append", metavar="URL", help=told)
    told = "of a PDCluster: all its routers are asked, through Kubernetes"
    which.add_argument("--cluster", metavar="NAME", help=told)
    parser.add_argument("-n", "--namespace", help="of the PDCluster (default: the context's)")
    parser.add_argument("--kubeconfig", metavar="PATH", help="to find the API server with (default: as kubectl)")
    parser.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
    return which


def ask_routers(given: argparse.Namespace, path: str) -> Answers:
    """The answers to this GET. Waits at most 10 s for each router, and for the list of them.

    Raises:
        Unanswered: The API server does not say which pods there are, or there are none.
    """
    if not given.cluster:
        return {url: _ask_url(url, path) for url in given.url or [DEFAULT_URL]}
    try:
        return asyncio.run(_ask_pods(given.cluster, given, path))
    except (ConfigError, Unavailable, OSError) as error:
        raise Unanswered(str(error)) from error


def _ask_url(url: str, path: str) -> bytes | str:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or INTERNAL_PORT, timeout=_ASK_S)
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no answer: {str(error) or type(error).__name__}: is this a router's internal port?"
    if response.status != 200:
        return f"it answered {response.status}: is this the internal port of a router of this version?"
    return body


async def _ask_pods(cluster: str, given: argparse.Namespace, path: str) -> Answers:
    from pdcluster_cli.documents import find_access, where_of
    from pdcluster_kube.reader import KubeReader

    where = where_of(given)
    access, own = await find_access(where)
    pods_path = f"/api/v1/namespaces/{quote(where.namespace or own)}/pods"
    reader = KubeReader(access, timeout_s=_ASK_S, user_agent="pdcluster")
    pods = await _router_pods(reader, pods_path, cluster)
    if not pods:
        raise Unanswered(f"no router pods of PDCluster {where.namespace or own}/{cluster}: are its name and -n right?")
    asked = (_ask_pod(reader, f"{pods_path}/{quote(pod)}:{INTERNAL_PORT}/proxy{path}") for pod in pods)
    return dict(zip(pods, await asyncio.gather(*asked), strict=True))


async def _router_pods(reader: KubeReader, pods_path: str, cluster: str) -> list[str]:
    from pdcluster_operator.core.names import cluster_label

    selector = quote(f"{labels.CLUSTER}={cluster_label(cluster)},{labels.COMPONENT}={_ROUTER}")
    try:
        listed = msgspec.json.decode(await reader.read(f"{pods_path}?labelSelector={selector}"), type=_Pods)
    except msgspec.DecodeError as error:
        raise Unanswered(f"the API server's list of pods cannot be read: {error}") from error
    return sorted(pod.metadata.name for pod in listed.items)


async def _ask_pod(reader: KubeReader, path: str) -> bytes | str:
    try:
        return await reader.read(path)
    except Unavailable as error:
        cure = "your account needs `get` on `pods/proxy`, and network policies must let the API server in"
        return f"{error} ({cure}; else `kubectl port-forward` to port {INTERNAL_PORT}, and --url)"


class _Metadata(msgspec.Struct):
    name: str


class _Pod(msgspec.Struct):
    metadata: _Metadata


class _Pods(msgspec.Struct):
    items: list[_Pod]
