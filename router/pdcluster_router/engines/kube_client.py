"""Reading from a Kubernetes API server: one answer, or a stream of lines. Each on a connection of its own.

The standard library only: the router needs two requests of the API, and a client library would bring more code than
the router has. Decides nothing about what it reads. Every wait has a deadline; files are read anew for each request,
because Kubernetes renews the token, and may renew the CA, while we run.

Where the API server of a pod is: Kubernetes' page "Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pdcluster_protocol.errors import Unavailable
from pdcluster_router.settings import Settings

MAX_BODY_BYTES: Final = 64 << 20
"""Bytes of one answer or one line: some hundred thousand endpoints, far above what one cluster has."""

_READ_BYTES: Final = 64 << 10
_MAX_QUOTED_BYTES: Final = 300


class Refused(Unavailable):
    """The API server answered, but not 200."""

    def __init__(self, status: int, retry_after_s: float, text: str) -> None:
        super().__init__(f"the API server answered {status}: {text}")
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """Where the API server is, and who we are."""

    url: str
    ca_file: Path | None
    """None: the system's own authorities."""
    token_file: Path | None
    """None: no token, for an API server, or a proxy to one, that asks for none."""


def access_of(settings: Settings) -> KubeAccess:
    """What the settings say. Only with ``Discovery.KUBERNETES``."""
    assert settings.kube_api is not None
    return KubeAccess(settings.kube_api, settings.kube_ca_file, settings.kube_token_file)


class KubeClient:
    """Reads from one API server. Holds no connection between calls."""

    def __init__(self, access: KubeAccess, *, timeout_s: float) -> None:
        """``timeout_s``: seconds to connect and get an answer's head, and for a whole answer."""
        self._access = access
        self._timeout_s = timeout_s

    async def read(self, path: str) -> bytes:
        """The whole body of a 200.

        Raises:
            Refused: Any other status.
            Unavailable: No whole answer in time.
        """
        deadline = self._deadline(self._timeout_s)
        async with self._answer(path, deadline) as body:
            whole = bytearray()
            while part := await body.read(deadline):
                whole += part
                if len(whole) > MAX_BODY_BYTES:
                    raise Unavailable(f"the answer is larger than {MAX_BODY_BYTES} bytes")
            return bytes(whole)

    @asynccontextmanager
    async def stream(self, path: str, *, limit_s: float) -> AsyncIterator[Lines]:
        """The lines of a 200, for ``limit_s`` seconds at most.

        Raises:
            Refused: Any other status.
            Unavailable: No head in time. ``Lines.next`` raises it too.
        """
        async with self._answer(path, self._deadline(self._timeout_s)) as body:
            yield Lines(body, self._deadline(limit_s))

    @asynccontextmanager
    async def _answer(self, path: str, deadline: float) -> AsyncIterator[_Body]:
        writer: asyncio.StreamWriter | None = None
        try:
            with _errors_in_plain_words():
                async with asyncio.timeout_at(deadline):
                    reader, writer = await self._connect()
                    writer.write(self._request(path))
                    status, headers = await _read_head(reader)
                body = _Body(reader, headers)
            if status != 200:
                text = (await body.read(deadline))[:_MAX_QUOTED_BYTES].decode("utf-8", "replace")
                raise Refused(status, _retry_after_s(headers), text)
            yield body
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self._access.url)
        is_tls = parts.scheme == "https"
        context = _context_of(self._access.ca_file) if is_tls else None
        port = parts.port or (443 if is_tls else 80)
        return await asyncio.open_connection(parts.hostname, port, ssl=context, limit=_READ_BYTES)

    def _request(self, path: str) -> bytes:
        token_file = self._access.token_file
        lines = [f"GET {path} HTTP/1.1", f"host: {urlsplit(self._access.url).netloc}", "accept: application/json"]
        lines += ["user-agent: pdcluster-router", "connection: close"]
        if token_file is not None:
            lines.append(f"authorization: Bearer {token_file.read_text().strip()}")
        return "\r\n".join([*lines, "", ""]).encode()

    def _deadline(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds


class Lines:
    """The lines of one answer, as they come. One task reads them."""

    def __init__(self, body: _Body, deadline: float) -> None:
        self._body = body
        self._deadline = deadline
        self._rest = bytearray()

    async def next(self) -> bytes | None:
        """The next line that is not empty; None when the answer has come to its own end.

        Raises:
            Unavailable: The answer was cut, or time is up.
        """
        while True:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                if line.strip():
                    return bytes(line)
            elif not await self._read_more():
                return None

    async def _read_more(self) -> bool:
        part = await self._body.read(self._deadline)
        self._rest += part
        if len(self._rest) > MAX_BODY_BYTES:
            raise Unavailable(f"one line is longer than {MAX_BODY_BYTES} bytes")
        return bool(part)


class _Body:
    """The body of one answer, part by part."""

    def __init__(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> None:
        self._reader = reader
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._left = int(headers.get("content-length", 0))
        self._num_bytes = 0
        if not self._is_chunked and "content-length" not in headers:
            raise Unavailable(
                "the answer has neither a length nor chunks, so its end cannot be told from a lost connection"
            )

    async def read(self, deadline: float) -> bytes:
        """The next part; empty at the end."""
        with _errors_in_plain_words():
            async with asyncio.timeout_at(deadline):
                return await (self._read_chunk() if self._is_chunked else self._read_part())

    async def _read_chunk(self) -> bytes:
        size = int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16)
        if not 0 <= size <= MAX_BODY_BYTES:
            raise ValueError(f"a chunk of {size} bytes")
        return (await self._reader.readexactly(size + 2))[:-2]

    async def _read_part(self) -> bytes:
        part = await self._reader.read(min(self._left, _READ_BYTES))
        if self._left and not part:
            raise EOFError("the answer was cut")
        self._left -= len(part)
        return part


def _context_of(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    # Since Python 3.13 the default asks for key identifiers, which the authorities of older clusters do not have.
    # Who the server is, is still verified.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}


def _retry_after_s(headers: dict[str, str]) -> float:
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0


@contextmanager
def _errors_in_plain_words() -> Iterator[None]:
    """Whatever can go wrong with a file or a connection is Unavailable, in words."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable("the API server sent nothing in time") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Unavailable(f"{where}{error.strerror or error}") from error
    except EOFError as error:
        raise Unavailable("the connection was cut") from error
    except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise Unavailable(f"the answer is not HTTP: {error}") from error


SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def api_server_of(environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> dict[str, object]:
    """Settings by name, only those that are known. Outside of a pod: none."""
    told: dict[str, object] = {}
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if host and port:
        told["kube_api"] = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    files = {"kube_ca_file": service_account / "ca.crt", "kube_token_file": service_account / "token"}
    told |= {name: path for name, path in files.items() if path.is_file()}
    namespace_file = service_account / "namespace"
    if namespace_file.is_file():
        told["namespace"] = namespace_file.read_text().strip()
    return told
