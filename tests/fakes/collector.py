"""An OpenTelemetry collector for one test: takes OTLP over HTTP, and parses it with OpenTelemetry's own messages.

It may be dead, slow or lying: ``answer`` says what a POST gets. ``tests/contract/test_otlp.py`` holds it to the real
collector.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from fakes.tls_server import TlsServer
from patience import PATIENCE_S

OK: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True)
class TakenSpan:
    """One span, as it was taken. Times are nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    is_error: bool
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    resource: dict[str, Any]


@dataclass
class FakeCollector:
    """What came. ``answer`` writes each POST's answer to its socket."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    answer: Callable[[Any], None] = lambda wire: wire.write(OK)
    _came: threading.Condition = field(default_factory=threading.Condition)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        with self._came:
            self.paths.append(path)
            self.headers.append(headers)
            self.bodies.append(body)
            self._came.notify_all()

    @property
    def spans(self) -> list[TakenSpan]:
        return [span for body in self.bodies for span in spans_in(body)]

    def wait_for(self, is_true: Callable[[FakeCollector], bool]) -> None:
        with self._came:
            assert self._came.wait_for(lambda: is_true(self), PATIENCE_S), "the spans did not come"


def spans_in(body: bytes) -> list[TakenSpan]:
    told = ExportTraceServiceRequest.FromString(body)
    return [
        TakenSpan(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            name=span.name,
            kind=span.kind,
            is_error=span.status.code == 2,
            begin_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes={one.key: value_of(one.value) for one in span.attributes},
            events=[event.name for event in span.events],
            resource={one.key: value_of(one.value) for one in of_one.resource.attributes},
        )
        for of_one in told.resource_spans
        for scope in of_one.scope_spans
        for span in scope.spans
    ]


def value_of(value: AnyValue) -> Any:
    return getattr(value, str(value.WhichOneof("value")))


@contextmanager
def running_collector(tls: ssl.SSLContext | None = None) -> Iterator[FakeCollector]:
    """``tls``: it is reached by https alone."""
    collector = FakeCollector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            collector.answer(self.wfile)

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    server = TlsServer(Handler, tls)
    collector.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
