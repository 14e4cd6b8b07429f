"""Hands the spans of pushes and receives to vLLM's tracer.

    scheduler process                      worker process
    TraceParents.add, take_new  --step-->  TransferSpans.expect
                                           a push or receive ends --> TransferSpans.tell --> thread --> vLLM's tracer

With ``--otlp-traces-endpoint`` vLLM gives a request its ``trace_headers``, and sets an environment variable by which
its worker processes make a tracer (vLLM 0.23 to 0.33 ``tracing/otel.py``, ``init_otel_worker_tracer``). Nothing here
has a setting of its own, and an engine that does not trace does nothing here. vLLM sets the variable where it makes its
one API server in Python. With others, or with ``--headless``, a person has to set it. Ray's executors make no tracer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdcluster_connector.core.transfer_spans import (
    TRACE_HEADER,
    TransferLine,
    TransferSpan,
    sampled_parent,
    span_of,
)
from pdcluster_connector.ending import RunningPart, left_s
from pdcluster_protocol.ids import RequestId

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from vllm.v1.request import Request

_LOG: Final = logging.getLogger("vllm.pdcluster.spans")

MAX_WAITING: Final = 1_000
"""Ended pushes and receives that wait to become spans. Others are dropped, and told of once."""
MAX_PARENTS: Final = 4_096
"""Requests of which a worker knows that they are traced. With more, those that came first lose their spans."""
_REST_S: Final = 0.0005
"""The pause after each span. The thread holds Python's lock for some 40 us for each; the forward pass wants it too."""
_END_WITHIN_S: Final = 1.0
_ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


class TraceParents:
    """The ``traceparent`` of new requests whose callers record them. Scheduler thread only."""

    def __init__(self) -> None:
        self._new: dict[RequestId, str] = {}

    def add(self, request: Request) -> None:
        if parent := sampled_parent(request.trace_headers):
            self._new[request.request_id] = parent

    def take_new(self) -> dict[RequestId, str]:
        """Those since the last call. The workers get them with this step."""
        new, self._new = self._new, {}
        return new


class TransferSpans:
    """Makes the spans of traced requests in a thread of its own, which begins with the first of them."""

    def __init__(self, engine_id: str, rank: int, tracer_of: Callable[[], Tracer | None] | None = None) -> None:
        """``tracer_of``: asked once, in the thread, and returns None if there is none; None: vLLM's."""
        self._attributes: dict[str, str | int] = {"pdcluster.engine_id": engine_id, "pdcluster.rank": rank}
        self._tracer_of = tracer_of or _tracer_of_vllm
        self._parents: OrderedDict[RequestId, str] = OrderedDict()
        """The forward thread adds and drops; others look up."""
        self._waiting: Queue[tuple[TransferLine, str]] = Queue(MAX_WAITING)
        self._is_closing = False
        self._has_dropped = False
        self._thread = threading.Thread(target=self._main, name="pdcluster-spans", daemon=True)

    def expect(self, parents: Mapping[RequestId, str]) -> None:
        """These requests are traced. Forward thread only; never waits."""
        if not parents:
            return
        self._parents.update(parents)
        while len(self._parents) > MAX_PARENTS:
            self._parents.popitem(last=False)
        if self._thread.ident is None and not self._is_closing:
            self._start()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may be out of threads
            _LOG.warning("spans not made reason=%s", error)
            self._is_closing = True

    def tell(self, line: TransferLine) -> None:
        """A push or receive has ended. Any thread; never waits."""
        parent = self._parents.get(line.request_id)
        if parent is None or self._is_closing:
            return
        try:
            self._waiting.put_nowait((line, parent))
        except Full:
            if not self._has_dropped:
                _LOG.warning("spans dropped waiting=%d", MAX_WAITING)
            self._has_dropped = True

    def close(self, deadline: float) -> bool:
        """Makes the spans that wait, for up to 1 s but not beyond ``deadline`` (monotonic seconds). Returns True: no
        span reads KV."""
        self._is_closing = True
        if self._thread.ident is not None:
            self._thread.join(min(_END_WITHIN_S, left_s(deadline)))
        return True

    def _main(self) -> None:
        try:
            if (tracer := self._tracer_of()) is None:
                _LOG.warning("spans not made reason=no tracer in this process, set %s", _ENDPOINT_VARIABLE)
            else:
                self._make_spans(tracer)
        except Exception:  # noqa: BLE001  # top of a thread: spans end, requests go on
            _LOG.exception("spans end")
        finally:
            self._is_closing = True
            self._waiting.queue.clear()

    def _make_spans(self, tracer: Tracer) -> None:
        while not (self._is_closing and self._waiting.empty()):
            try:
                line, parent = self._waiting.get(timeout=_END_WITHIN_S / 4)
            except Empty:
                continue
            if (span := span_of(line)) is not None:
                context = TraceContextTextMapPropagator().extract({TRACE_HEADER: parent})
                self._emit(tracer, span, context, time.time() - time.monotonic())

    def _emit(self, tracer: Tracer, span: TransferSpan, context: Context, epoch_s: float) -> None:
        """``epoch_s``: the wall clock's seconds at monotonic second 0."""
        begin_ns, end_ns = (int((at + epoch_s) * 1e9) for at in (span.begin, span.end))
        made = tracer.start_span(
            span.name, context, attributes={**span.attributes, **self._attributes}, start_time=begin_ns
        )
        if span.write_begin is not None:
            made.add_event("write", timestamp=int((span.write_begin + epoch_s) * 1e9))
        if span.error:
            made.set_status(Status(StatusCode.ERROR))
            made.set_attribute("error.type", span.error)
        below = trace.set_span_in_context(made, context)
        for part in span.parts:
            self._emit(tracer, part, below, epoch_s)
        made.end(end_ns)
        time.sleep(_REST_S)


def _tracer_of_vllm() -> Tracer | None:
    """None: vLLM has made none in this process, and OpenTelemetry's own would do nothing."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace.get_tracer("pdcluster.connector")


def end_traced(rank: RunningPart, spans: TransferSpans, deadline: float) -> bool:
    """Ends the rank, and then the spans of what ends with it, in the time that the rank leaves. As ``RunningPart``."""
    try:
        return rank.close(deadline)
    finally:
        spans.close(deadline)
