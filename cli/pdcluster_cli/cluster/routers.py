"""Asks a pool's routers at their internal ports: by URL, or each pod through the API server's proxy.

A URL with https is asked over TLS. If a flag of TLS is given, so is a URL without a scheme, and one with http is
refused. Through Kubernetes the API server speaks TLS to routers that have it, and does not verify their certificates.

Each router knows only its own requests, so all are asked. If a router does not answer, its entry says why.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import ssl
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from pdcluster_cli.cluster.event_loop import run
from pdcluster_cli.commands import add_cluster_flags
from pdcluster_cli.tls_flags import TlsFlags, Unusable, add_tls_flags, tls_flags_of
from pdcluster_protocol import labels
from pdcluster_protocol.errors import NO_JSON, ConfigError, Unavailable
from pdcluster_protocol.launch import INTERNAL_PORT, router_flag

if TYPE_CHECKING:
    from socket import socket

    from pdcluster_kube.reader import KubeReader

DEFAULT_URL: Final = f"http://127.0.0.1:{INTERNAL_PORT}"
"""URL of a router's internal port on this machine, by its default number."""
ASK_S: Final = 10.0
_MAX_ANSWER_BYTES: Final = 64 << 20
"""Largest answer that is read: far above that of a pool with thousands of engines."""
_PART_BYTES: Final = 1 << 16
_ROUTER: Final = "router"
_TLS_FLAG: Final = router_flag("--internal-tls-cert", "")
"""The beginning of a word on a router's command line if its internal port has TLS."""
_Paths = tuple[str, str]
"""The path to ask for, and an older path for routers that do not know the first; empty: no older path."""
Answers = dict[str, bytes | str]
"""By router: the body of its answer, or why there is none."""
_NOT_FOUND: Final = 404


class EarlierAnswer(bytes):
    """An answer to the older path, from a router of an earlier version that does not know the first path."""


class Unanswered(Exception):
    """No router can be asked. The message says why, and what to do."""


def add_router_flags(parser: argparse.ArgumentParser) -> Any:
    """Add the flags that ``ask_routers`` reads. Returns the group of those that exclude each other."""
    which = parser.add_mutually_exclusive_group()
    told = f"of a router's internal port; repeat it for more (default: {DEFAULT_URL})"
    which.add_argument("--url", action="append", type=_url, metavar="URL", help=told)
    told = "of a PDCluster: all its routers are asked, through Kubernetes"
    which.add_argument("--cluster", metavar="NAME", help=told)
    parser.add_argument("-n", "--namespace", help="of the PDCluster (default: the context's)")
    add_cluster_flags(parser)
    add_tls_flags(parser)
    return which


def _url(word: str) -> str:
    """``word``, if it has no password in it: a line of output begins with the URL that was asked."""
    if "@" in word:
        raise argparse.ArgumentTypeError("a router's internal port asks for no password: leave it out, and the @")
    return word


def ask_routers(given: argparse.Namespace, path: str, timeout_s: float = ASK_S, *, older: str = "") -> Answers:
    """The answers to this GET. Waits at most ``timeout_s`` for the list of routers, and again for all answers.

    ``older``: the path to ask a router for if it does not know ``path``: see ``EarlierAnswer``. While an
    upgrade rolls, a pool has routers of two versions.

    Raises:
        Unanswered: The API server does not list the routers' pods, or there are none.
    """
    if not given.cluster:
        tls = tls_flags_of(given)
        return run(_ask_urls(given.url or [_default_url(tls)], tls, (path, older), timeout_s))
    try:
        return run(_ask_pods(given.cluster, given, (path, older), timeout_s))
    except (ConfigError, Unavailable, OSError) as error:
        from pdcluster_cli.cluster.documents import no_way_because

        raise Unanswered(no_way_because(error)) from error


def _default_url(tls: TlsFlags) -> str:
    return DEFAULT_URL.replace("http:", "https:") if tls.is_given else DEFAULT_URL


async def _ask_urls(urls: Sequence[str], tls: TlsFlags, paths: _Paths, timeout_s: float) -> Answers:
    return dict(zip(urls, await asyncio.gather(*(_ask_url(url, tls, paths, timeout_s) for url in urls)), strict=True))


async def _ask_url(url: str, tls: TlsFlags, paths: _Paths, timeout_s: float) -> bytes | str:
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await _get_either(url, tls, paths)
    except ssl.SSLError as error:
        return f"no answer: {tls.told_of(error)}"
    except Unusable as error:
        return f"no answer: {error}"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s: is this a router's internal port?"
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, ConnectionResetError) and _has_tls(url, tls):
            return f"no answer: it hung up behind the TLS agreement: {tls.told_of_refusal}"
        return f"no answer: {str(error) or type(error).__name__}: is this a router's internal port?"
    if status == 400:
        return "it answered 400: is this the internal port of a router of this version? One with TLS is asked by https"
    if status != 200:
        return f"it answered {status}: is this the internal port of a router of this version?"
    return body


async def _get_either(url: str, tls: TlsFlags, paths: _Paths) -> tuple[int, bytes]:
    path, older = paths
    status, body = await _get(url, tls, path)
    if status != _NOT_FOUND or not older:
        return status, body
    status, body = await _get(url, tls, older)
    return status, EarlierAnswer(body)


async def _get(url: str, tls: TlsFlags, path: str) -> tuple[int, bytes]:
    """Status and body. Reads until the peer closes, up to a limit of bytes; the caller limits the time."""
    parts = _parts_of(url)
    if parts.scheme not in ("", "http", "https"):
        raise ValueError(f"a router's internal port speaks http or https, not {parts.scheme}")
    if parts.scheme == "http" and tls.is_given:
        raise ValueError("this URL is http, and a flag of TLS is given: write https, or leave the flag out")
    host, port = parts.hostname or "", parts.port or INTERNAL_PORT
    if _has_tls(url, tls):
        opened = asyncio.open_connection(host, port, ssl=tls.context(), server_hostname=tls.name or host)
    else:
        opened = asyncio.open_connection(host, port)
    reader, writer = await opened
    try:
        lines = (f"GET {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close", "", "")
        writer.write("\r\n".join(lines).encode("latin-1"))
        return _read(await _read_all(reader))
    finally:
        writer.close()


def _parts_of(url: str) -> SplitResult:
    return urlsplit(url if "//" in url else f"//{url}")


def _has_tls(url: str, tls: TlsFlags) -> bool:
    return _parts_of(url).scheme == "https" or tls.is_given


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    whole = bytearray()
    while part := await reader.read(_PART_BYTES):
        whole += part
        if len(whole) > _MAX_ANSWER_BYTES:
            raise ValueError(f"it sent more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(whole)


def _read(answer: bytes) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(cast("socket", _Read(answer)))
    response.begin()
    return response.status, response.read()


class _Read:
    """Stands for a socket that has received everything, as far as ``HTTPResponse`` uses one."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, _mode: str) -> BytesIO:
        return BytesIO(self._answer)


async def _ask_pods(cluster: str, given: argparse.Namespace, paths: _Paths, timeout_s: float) -> Answers:
    from pdcluster_cli.cluster.documents import find_access, where_of
    from pdcluster_kube.reader import KubeReader

    where = where_of(given)
    access, own = await find_access(where)
    pods_path = f"/api/v1/namespaces/{quote(where.namespace or own)}/pods"
    reader = KubeReader(access, timeout_s=timeout_s, user_agent="pdcluster")
    pods = await _router_pods(reader, pods_path, cluster)
    if not pods:
        raise Unanswered(f"no router pods of PDCluster {where.namespace or own}/{cluster}: are its name and -n right?")
    proxies = (f"{pods_path}/{quote(pod.proxied, safe=':')}:{INTERNAL_PORT}/proxy" for pod in pods)
    asked = (_ask_pod(reader, proxy, paths, timeout_s) for proxy in proxies)
    return dict(zip((pod.metadata.name for pod in pods), await asyncio.gather(*asked), strict=True))


async def _router_pods(reader: KubeReader, pods_path: str, cluster: str) -> list[_Pod]:
    from pdcluster_operator.core.names import cluster_label

    selector = quote(f"{labels.CLUSTER}={cluster_label(cluster)},{labels.COMPONENT}={_ROUTER}")
    try:
        listed = msgspec.json.decode(await reader.read(f"{pods_path}?labelSelector={selector}"), type=_Pods)
    except NO_JSON as error:
        raise Unanswered(f"the API server's list of pods cannot be read: {error}") from error
    return sorted(listed.items, key=lambda pod: pod.metadata.name)


async def _ask_pod(reader: KubeReader, proxy: str, paths: _Paths, timeout_s: float) -> bytes | str:
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_either(reader, proxy, paths)
    except (Unavailable, TimeoutError) as error:
        problem = str(error) or f"no answer within {timeout_s:g} s"
        cure = "your account needs `get` on `pods/proxy`, and network policies must let the API server in"
        return f"{problem} ({cure}; else `kubectl port-forward` to port {INTERNAL_PORT}, and --url)"


async def _read_either(reader: KubeReader, proxy: str, paths: _Paths) -> bytes:
    from pdcluster_kube.reader import ApiStatusError

    path, older = paths
    try:
        return await reader.read(proxy + path)
    except ApiStatusError as error:
        if error.status != _NOT_FOUND or not older:
            raise
    return EarlierAnswer(await reader.read(proxy + older))


class _PodMetadata(msgspec.Struct):
    name: str


class _Container(msgspec.Struct):
    args: list[str] = []


class _PodSpec(msgspec.Struct):
    containers: list[_Container] = []


class _Pod(msgspec.Struct):
    metadata: _PodMetadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)

    @property
    def proxied(self) -> str:
        """The pod's name for the API server's proxy, which asks ``https:NAME`` over TLS."""
        has_tls = any(word.startswith(_TLS_FLAG) for one in self.spec.containers for word in one.args)
        return f"https:{self.metadata.name}" if has_tls else self.metadata.name


class _Pods(msgspec.Struct):
    items: list[_Pod]
