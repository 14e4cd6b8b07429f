"""Where the API server is and who we are: one HTTP session, for our own calls and for kopf's watches.

The token file is read anew when it has changed, because Kubernetes renews a pod's token every hour.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

USER_AGENT: Final = "pdcluster-operator"
MAX_CONNECTIONS: Final = 128
"""A watch for each kind and namespace, the workers, and the Lease, with room to spare."""


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """``ca_file``: None for the system's own authorities. ``token_file``: None for a proxy that asks for none."""

    url: str
    ca_file: Path | None = None
    token_file: Path | None = None


def open_session(access: KubeAccess) -> aiohttp.ClientSession:
    """A session that says who we are. The caller closes it."""
    token = _Token(access.token_file)

    async def say_who(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        if access.token_file is not None:
            request.headers["Authorization"] = f"Bearer {token.read()}"
        return await send(request)

    connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=_context_of(access))
    return aiohttp.ClientSession(connector=connector, headers={"User-Agent": USER_AGENT}, middlewares=(say_who,))


class _Token:
    """A small file that is read again when it is another one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._changed_ns = -1
        self._text = ""

    def read(self) -> str:
        assert self._path is not None
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._changed_ns:
            self._text, self._changed_ns = self._path.read_text().strip(), changed_ns
        return self._text


def _context_of(access: KubeAccess) -> ssl.SSLContext | bool:
    if not access.url.startswith("https:"):
        return True
    context = ssl.create_default_context(cafile=access.ca_file)
    # Since Python 3.13 the default asks for key identifiers, which the authorities of older clusters do not have.
    # Who the server is, is still verified.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
