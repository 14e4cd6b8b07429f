"""A threaded HTTP server whose connections may have to agree on TLS first, each in its own thread, as uvicorn's do."""

from __future__ import annotations

import ssl
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class TlsServer(ThreadingHTTPServer):
    """On a port of its own. ``tls``: None: plain HTTP."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        super().__init__(("127.0.0.1", 0), handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        with suppress(ssl.SSLError, ConnectionError), self._tls.wrap_socket(request, server_side=True) as agreed:
            super().finish_request(agreed, client_address)
