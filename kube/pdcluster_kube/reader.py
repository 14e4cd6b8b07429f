"""Reads from an API server: one answer, or a stream of lines. Each request has a session of its own.

The caller interprets a 200. Every wait has a deadline. Token and authorities are read anew for each request, because
Kubernetes renews the token while we run, and may renew the authorities.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import aiohttp
import msgspec

from pdcluster_kube.access import ApiAccess
from pdcluster_kube.session import open_session
from pdcluster_protocol.errors import NO_JSON, Unavailable

MAX_BODY_BYTES: Final = 64 << 20
"""The most bytes of one answer or one line: some hundred thousand endpoints, which is more than any cluster has."""

_MAX_STATUS_BYTES: Final = 1 << 20
_MAX_QUOTED: Final = 300


class ApiStatusError(Unavailable):
    """The API server answered, but not 200. ``reason``: from its Status, such as ``NotFound``; empty: the answer has no
    Status of an API server that knows the path."""

    def __init__(self, status: int, retry_after_s: float, text: str, reason: str = "") -> None:
        super().__init__(f"the API server answered {status}: {text}")
        self.status = status
        self.retry_after_s = retry_after_s
        self.reason = reason


class _ApiRefusal(msgspec.Struct):
    """An API server's refusal (meta/v1, Status)."""

    message: str = ""
    reason: str = ""


class KubeReader:
    """Reads from one API server. Keeps no connection open between calls."""

    def __init__(self, access: ApiAccess, *, timeout_s: float, user_agent: str = "pdcluster") -> None:
        """``timeout_s``: seconds for a whole answer of ``read``, and for the head of a ``stream``."""
        self._access = access
        self._timeout_s = timeout_s
        self._user_agent = user_agent

    async def read(self, path: str) -> bytes:
        """The whole body of a 200.

        Raises:
            ApiStatusError: Any other status.
            Unavailable: No whole answer in time, or too large a one.
        """
        deadline = _deadline(self._timeout_s)
        async with self._answer(path, deadline) as response:
            return await _read_whole(response, deadline, MAX_BODY_BYTES)

    @asynccontextmanager
    async def stream(self, path: str, *, limit_s: float) -> AsyncIterator[Lines]:
        """The lines of a 200, for ``limit_s`` seconds at most.

        Raises:
            ApiStatusError: Any other status.
            Unavailable: No head in time. ``Lines.next`` raises it too.
        """
        async with self._answer(path, _deadline(self._timeout_s)) as response:
            yield Lines(response, _deadline(limit_s))

    @asynccontextmanager
    async def _answer(self, path: str, deadline: float) -> AsyncIterator[aiohttp.ClientResponse]:
        with _errors_in_plain_words():
            session = open_session(self._access, self._user_agent)
        async with session:
            response = await self._head(session, path, deadline)
            try:
                if response.status != 200:
                    raise await _refusal(response, deadline)
                _require_an_end(response)
                yield response
            finally:
                response.close()

    async def _head(self, session: aiohttp.ClientSession, path: str, deadline: float) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        with _errors_in_plain_words():
            async with asyncio.timeout_at(deadline):
                return await session.get(
                    self._access.url + path, headers=headers, allow_redirects=False, timeout=aiohttp.ClientTimeout()
                )


class Lines:
    """The lines of one answer, as they come. One task reads the lines."""

    def __init__(self, response: aiohttp.ClientResponse, deadline: float) -> None:
        self._response = response
        self._deadline = deadline
        self._rest = bytearray()

    async def next(self) -> bytes | None:
        """The next line that is not empty; None: the answer has ended.

        Raises:
            Unavailable: The answer was cut, the time is over, or a line is too long.
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
        part = await _read_part(self._response, self._deadline)
        self._rest += part
        if len(self._rest) > MAX_BODY_BYTES:
            raise Unavailable(f"one line is longer than {MAX_BODY_BYTES} bytes")
        return bool(part)


async def _read_part(response: aiohttp.ClientResponse, deadline: float) -> bytes:
    """The bytes that have come, at least one; empty: the answer has ended."""
    with _errors_in_plain_words():
        async with asyncio.timeout_at(deadline):
            return await response.content.readany()


async def _read_whole(response: aiohttp.ClientResponse, deadline: float, limit_bytes: int) -> bytes:
    whole = bytearray()
    while part := await _read_part(response, deadline):
        whole += part
        if len(whole) > limit_bytes:
            raise Unavailable(f"the answer is larger than {limit_bytes} bytes")
    return bytes(whole)


def _require_an_end(response: aiohttp.ClientResponse) -> None:
    if "Content-Length" not in response.headers and "Transfer-Encoding" not in response.headers:
        raise Unavailable(
            "the answer has neither a length nor chunks, so its end cannot be told from a lost connection"
        )


async def _refusal(response: aiohttp.ClientResponse, deadline: float) -> ApiStatusError:
    body = await _read_whole(response, deadline, _MAX_STATUS_BYTES)
    value = response.headers.get("Retry-After", "")
    try:
        said = msgspec.json.decode(body, type=_ApiRefusal)
    except NO_JSON:
        said = _ApiRefusal(body.decode("utf-8", "replace"))
    retry_after_s = float(value) if value.isdecimal() else 0.0
    return ApiStatusError(response.status, retry_after_s, " ".join(said.message.split())[:_MAX_QUOTED], said.reason)


def _deadline(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


@contextmanager
def _errors_in_plain_words() -> Iterator[None]:
    """Turn an error of a file or a connection into an ``Unavailable`` with a message for people."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable("the API server sent nothing in time") from error
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
        raise Unavailable("the connection was cut") from error
    except aiohttp.ClientResponseError as error:
        raise Unavailable(f"the answer is not HTTP: {' '.join(error.message.split())}") from error
    except aiohttp.ClientError as error:
        raise Unavailable(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Unavailable(f"{where}{error.strerror or error}") from error
    except ValueError as error:
        raise Unavailable(f"the answer is not HTTP: {error}") from error
