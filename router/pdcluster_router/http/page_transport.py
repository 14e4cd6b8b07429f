"""The transport of a page that FastAPI answers, on a connection that may be closed."""

from __future__ import annotations

import asyncio


class PageTransport:
    """Drops all that is written to a closed connection. When a client leaves, uvicorn tells only the newest page of
    the connection. If another page then wrote, uvloop would log a long error each time."""

    __slots__ = ("_transport", "close", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.close = transport.close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)
