"""OTLP over HTTP: spans as protobuf, and one POST to a collector.

The encoding is OpenTelemetry's own package ``opentelemetry-proto``, which only a router with spans imports. Source of
truth: https://opentelemetry.io/docs/specs/otlp, version 1. Of an answer some KiB are read, its head and trailer
included, and for some seconds: a collector that answers for ever costs neither memory nor Python's lock.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.telemetry.request_trace import NUM_SPAN_BYTES
from pdcluster_router.core.telemetry.spans import Attributes, SpanKind, TraceSpan

MAX_ANSWER_BYTES: Final = 64 << 10
_MOST_READ_BYTES: Final = 2 * MAX_ANSWER_BYTES
"""Of one answer: of its head, its body and what follows. Python's own limits are one for each line, not for all."""
TIMEOUT_S: Final = 10.0
"""Seconds for a connection, for a body to be sent, and for a whole answer: OpenTelemetry's default."""
_FAILURES: Final = (OSError, http.client.HTTPException)
_ENDED_TLS: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""The other end has closed its connection, without a word of TLS and with one."""
_SCOPE: Final = InstrumentationScope(name="pdcluster_router")
_NS: Final = 1_000_000_000
_KINDS: Final = {
    SpanKind.INTERNAL: SpanMessage.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: SpanMessage.SPAN_KIND_SERVER,
    SpanKind.CLIENT: SpanMessage.SPAN_KIND_CLIENT,
}
_RETRIED: Final = frozenset((429, 502, 503, 504))
"""Statuses after which OTLP asks for another try."""


class Sent(Enum):
    """The result of one POST."""

    TAKEN = "taken"
    AGAIN = "again"
    """The collector may take it later."""
    REFUSED = "refused"


class SpanEncoder:
    """Encodes the spans of one request after the other. The bytes of several requests, joined, are one message:
    protobuf adds repeated fields up."""

    def __init__(self, resource: Mapping[str, str]) -> None:
        """``resource``: the attributes of this router."""
        self._resource = Resource(attributes=_key_values(resource))

    def encode(self, trace_id: str, spans: Sequence[TraceSpan], arrived_at_unix_s: float) -> bytes:
        """An ``ExportTraceServiceRequest`` with these spans of one trace."""
        begin_ns = int(arrived_at_unix_s * _NS)
        told = [_message(bytes.fromhex(trace_id), span, begin_ns) for span in spans]
        found = ResourceSpans(resource=self._resource, scope_spans=[ScopeSpans(scope=_SCOPE, spans=told)])
        encoded: bytes = ExportTraceServiceRequest(resource_spans=[found]).SerializeToString()
        return encoded


def _message(trace_id: bytes, span: TraceSpan, begin_ns: int) -> SpanMessage:
    told = SpanMessage(
        trace_id=trace_id,
        span_id=span.span_id.to_bytes(NUM_SPAN_BYTES),
        parent_span_id=span.parent_id.to_bytes(NUM_SPAN_BYTES) if span.parent_id else b"",
        name=span.name,
        kind=_KINDS[span.kind],
        start_time_unix_nano=_at(begin_ns, span.begin_s),
        end_time_unix_nano=_at(begin_ns, span.end_s),
        attributes=_key_values(span.attributes),
    )
    if span.error:
        told.status.code = Status.STATUS_CODE_ERROR
    for event in span.events:
        told.events.add(
            name=event.name, time_unix_nano=_at(begin_ns, event.at_s), attributes=_key_values(event.attributes)
        )
    return told


def _at(begin_ns: int, at_s: float) -> int:
    return begin_ns + round(at_s * _NS)


def _key_values(attributes: Attributes) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in attributes.items()]


def _value(value: str | float | bool) -> AnyValue:
    if isinstance(value, bool):  # Before int: a bool is one.
        return AnyValue(bool_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(double_value=value)


class SpanCollector:
    """One collector. Sender's thread only; may wait. ``close`` ends its connection."""

    def __init__(
        self, url: str, headers: Mapping[str, str], ca_file: Path | None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """``url``: with its path. ``headers``: secrets are among them. ``ca_file``: None: the system's authorities.
        ``timeout_s``: as ``TIMEOUT_S``.

        Raises:
            ConfigError: ``ca_file`` has no certificates.
        """
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        self._host, self._path = parts.hostname or "", parts.path
        self._port = parts.port or (443 if is_tls else 80)  # Without one, ``http.client`` would look for it in ``::1``.
        self._tls = _tls_of(ca_file) if is_tls else None
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/x-protobuf", "user-agent": "pdcluster-router", **headers}
        self._connection: http.client.HTTPConnection | None = None
        self.problem = ""
        """Why the last POST was not taken whole."""

    def post(self, body: bytes) -> tuple[Sent, int]:
        """Sends ``body``. Returns what became of it, and how many spans the collector has rejected."""
        was_kept = self._connection is not None
        try:
            return self._post(body)
        except (ConnectionError, *_ENDED_TLS) as error:
            self.close()
            return self.post(body) if was_kept else self._failed(error)  # The collector has ended the one that we kept.
        except (*_FAILURES, ValueError) as error:
            self.close()
            return self._failed(error)

    def _failed(self, error: Exception) -> tuple[Sent, int]:
        if isinstance(error, _FAILURES):
            self.problem = str(error) or type(error).__name__
            return Sent.AGAIN, 0
        self.problem = f"it cannot be sent ({type(error).__name__})"  # The error may quote a header.
        return Sent.REFUSED, 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, body: bytes) -> tuple[Sent, int]:
        connection = self._connection = self._connection or self._connect()
        if connection.sock is not None:
            connection.sock.settimeout(self._timeout_s)  # The answer before has left some of it.
        connection.request("POST", self._path, body, self._headers)
        with connection.getresponse() as answer:
            said = answer.read(MAX_ANSWER_BYTES)
            if answer.will_close or not answer.isclosed():
                self.close()  # There is more: it is not read.
        if 200 <= answer.status < 300:
            return Sent.TAKEN, self._rejected_in(said)
        self.problem = f"it answered {answer.status}"
        return (Sent.AGAIN if answer.status in _RETRIED else Sent.REFUSED), 0

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            made = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        else:
            made = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)
        made.response_class = _BoundedAnswer
        return made

    def _rejected_in(self, said: bytes) -> int:
        try:
            partial = ExportTraceServiceResponse.FromString(said).partial_success
        except DecodeError:
            return 0  # It has said that it took them, in words of its own.
        num_rejected: int = max(0, partial.rejected_spans)
        if num_rejected:
            self.problem = f"it rejected {num_rejected} spans: {partial.error_message}"
        return num_rejected


class _BoundedAnswer(http.client.HTTPResponse):
    """An answer of which no more is read than there is time and room for."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedBytes(sock))


class _BoundedBytes(io.RawIOBase):
    """The bytes that come from ``sock``: so many, and for its timeout, which counts from now for all of them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._deadline = time.monotonic() + (sock.gettimeout() or TIMEOUT_S)
        self._left_bytes = _MOST_READ_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or not self._left_bytes:
            raise http.client.HTTPException("its answer has no end")
        self._sock.settimeout(left_s)
        num_read = self._raw.readinto(memoryview(buffer)[: self._left_bytes])
        self._left_bytes -= num_read or 0
        return num_read

    def close(self) -> None:
        self._raw.close()
        super().close()


def _tls_of(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"--otlp-ca {ca_file}: {error.strerror or error}: name a PEM file of authorities") from error
