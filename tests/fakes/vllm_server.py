"""The two pages of a vLLM engine that its pod's own probes read, on a real port."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from fakes.tls_server import TlsServer


@dataclass
class VllmPages:
    """What the engine says; a test changes it while it runs."""

    port: int = 0
    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    ended: int = 0
    health: int = 200
    has_gauges: bool = True
    is_stopped: bool = False
    """Takes connections and says nothing, as a process that was stopped."""
    asked: list[str] = field(default_factory=list)
    resumed: threading.Event = field(default_factory=threading.Event)

    def metrics(self) -> str:
        gauges = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.waiting,
            "vllm:kv_cache_usage_perc": self.kv_share,
            "vllm:request_success_total": self.ended,
        }
        lines = [f'{name}{{engine="0"}} {float(value)}\n' for name, value in gauges.items()]
        return "".join(lines) if self.has_gauges else "python_info 1.0\n"


@contextmanager
def serving(pages: VllmPages, context: ssl.SSLContext | None = None) -> Iterator[VllmPages]:
    """They are served until the end of the ``with``. ``context``: over TLS, as uvicorn's server does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages.asked.append(self.path)
            if pages.is_stopped:
                pages.resumed.wait(60)
                return
            self.send_response(pages.health if self.path == "/health" else 200)
            body = b"" if self.path == "/health" else pages.metrics().encode()
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's word
            """Nobody reads it."""

    with TlsServer(Handler, context) as server:
        pages.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield pages
        finally:
            pages.resumed.set()
            server.shutdown()
            thread.join()
