"""Opens HTTP sessions with an API server. Each request sends our newest credentials, over TLS as the access says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import aiohttp

from pdcluster_kube.access import ApiAccess, checked_header
from pdcluster_kube.documents import decode_document
from pdcluster_protocol.errors import Unavailable

MAX_CONNECTIONS: Final = 128
"""The most connections of a session without watches. A call beyond it waits."""
NO_LIMIT: Final = 0
"""For sessions with watches: each watch keeps a connection, so a watch that waited for one would wait for ever."""


def open_session(
    access: ApiAccess, user_agent: str = "pdcluster", *, max_connections: int = MAX_CONNECTIONS
) -> aiohttp.ClientSession:
    """A new session. The caller closes it, and sets the timeout of each call. If a token cannot be read or sent, the
    request raises a ``ClientConnectionError``.

    Raises:
        OSError: The file of the authorities, or of a client certificate, cannot be read.
    """
    credentials = access.credentials()

    async def say_who(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.server_hostname = access.server_name
        with _as_errors_of_aiohttp():
            sent = _set(request, credentials.header())
        response = await send(request)
        if response.status == 401:
            with _as_errors_of_aiohttp():
                if not await credentials.renew(sent):
                    return response
                _set(request, credentials.header())
            response.release()
            response = await send(request)
        return response

    connector = aiohttp.TCPConnector(limit=max_connections, ssl=access.tls() or True)
    return aiohttp.ClientSession(
        connector=connector, headers={"User-Agent": user_agent}, middlewares=(say_who,), proxy=access.proxy,
        response_class=_ParsedAnswer,
    )  # fmt: skip


class _ParsedAnswer(aiohttp.ClientResponse):
    """kopf reads lists by ``json``."""

    async def json(
        self, *, encoding: str | None = None, loads: Callable[[str], Any] = decode_document,
        content_type: str | None = "application/json",
    ) -> Any:  # fmt: skip
        return await super().json(encoding=encoding, loads=loads, content_type=content_type)


def _set(request: aiohttp.ClientRequest, header: str) -> str:
    """Returns the header.

    Raises:
        ValueError: It has a character that no HTTP header may have. aiohttp's own words would blame the answer.
    """
    if header:
        request.headers["Authorization"] = checked_header(header)
    return header


@contextmanager
def _as_errors_of_aiohttp() -> Iterator[None]:
    """Turn errors into errors of aiohttp: kopf's watches try again after those, and end with any other error."""
    try:
        yield
    except OSError as error:
        raise aiohttp.ClientConnectionError(f"{error.filename}: {error.strerror}") from error
    except (Unavailable, ValueError) as error:
        raise aiohttp.ClientConnectionError(str(error)) from error
