"""Spans of pushes and receives, given to OpenTelemetry's own tracer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer, format_span_id, format_trace_id

from patience import EDGE_S, until
from pdcluster_connector.vllm import transfer_spans
from pdcluster_connector.vllm.transfer_spans import MAX_PARENTS, TraceParents, TransferSpans, end_traced
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.trace import LayerTrace
from unit.connector.core.test_transfer_spans import SPAN, TRACE, push

PARENT = f"00-{TRACE}-{SPAN}-01"
R = RequestId("r")


class Taken:
    """A tracer of OpenTelemetry's SDK, and its spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def tracer(self) -> Tracer:
        return self._provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def request_with(headers: dict[str, str] | None) -> Any:
    return SimpleNamespace(request_id=R, trace_headers=headers)


def test_the_workers_learn_once_of_requests_whose_callers_record_them() -> None:
    parents = TraceParents()
    parents.add(request_with({"traceparent": PARENT}))
    parents.add(SimpleNamespace(request_id=RequestId("other"), trace_headers=None))
    assert parents.take_new() == {R: PARENT}
    assert parents.take_new() == {}


def test_spans_hang_below_the_callers_and_have_the_times_of_the_wall_clock() -> None:
    taken, now = Taken(), time.monotonic()
    spans = TransferSpans("engine", 2, taken.tracer)
    spans.expect({R: PARENT})
    spans.tell(push(LayerTrace(7, 0, now - 3, now - 2, now - 1, 8), outcome="failed", begin=now - 4))
    assert until(lambda: bool(taken.named("kv_push")))
    (whole,), (layer,) = taken.named("kv_push"), taken.named("kv_layer")
    assert whole.parent is not None
    assert (format_trace_id(whole.parent.trace_id), format_span_id(whole.parent.span_id)) == (TRACE, SPAN)
    assert layer.parent == whole.get_span_context()
    assert whole.attributes is not None
    assert (whole.attributes["pdcluster.engine_id"], whole.attributes["pdcluster.rank"]) == ("engine", 2)
    assert (whole.status.status_code, whole.attributes["error.type"]) == (StatusCode.ERROR, "push_failed")
    assert layer.status.status_code is StatusCode.UNSET
    assert [event.name for event in layer.events] == ["write"]
    moments = [whole.start_time, layer.start_time, layer.events[0].timestamp, layer.end_time]
    ages_s = [round(time.time() - (moment or 0) / 1e9 - (time.monotonic() - now)) for moment in moments]
    assert ages_s == [4, 3, 2, 1]
    assert spans.close(time.monotonic() + 1)


def test_what_is_not_traced_costs_no_thread() -> None:
    spans = TransferSpans("engine", 0, Taken().tracer)
    spans.expect({})
    spans.tell(push())
    assert spans._thread.ident is None
    assert spans.close(time.monotonic())


def test_a_worker_remembers_the_newest_requests() -> None:
    taken = Taken()
    spans = TransferSpans("engine", 0, taken.tracer)
    spans.expect({RequestId(str(number)): PARENT for number in range(MAX_PARENTS)} | {R: PARENT})
    assert len(spans._parents) == MAX_PARENTS
    assert R in spans._parents
    assert "0" not in spans._parents
    assert spans.close(time.monotonic() + 1)


def told(spans: TransferSpans, number: int) -> None:
    spans.expect({R: PARENT})
    for _ in range(number):
        spans.tell(push())


def test_more_than_may_wait_is_dropped_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_begin, taken = threading.Event(), Taken()
    monkeypatch.setattr(transfer_spans, "MAX_WAITING", 3)
    spans = TransferSpans("engine", 0, _late(may_begin, taken))
    told(spans, 6)
    may_begin.set()
    assert until(lambda: len(taken.named("kv_push")) == 3)
    assert caplog.messages == ["spans dropped waiting=3"]
    told(spans, 1)
    assert until(lambda: len(taken.named("kv_push")) == 4)
    assert spans.close(time.monotonic() + 1)


def _late(may_begin: threading.Event, taken: Taken) -> Callable[[], Tracer]:
    def tracer() -> Tracer:
        may_begin.wait()
        return taken.tracer()

    return tracer


def test_what_waits_at_the_end_becomes_spans_still() -> None:
    may_begin, taken = threading.Event(), Taken()
    spans = TransferSpans("engine", 0, _late(may_begin, taken))
    told(spans, 2)
    may_begin.set()
    spans.close(time.monotonic() + 1)
    assert until(lambda: not spans._thread.is_alive())
    assert len(taken.named("kv_push")) == 2


def test_a_process_without_a_tracer_of_vllm_makes_no_spans_and_says_what_to_set(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_PYTHON_TRACER_PROVIDER", raising=False)
    spans = TransferSpans("engine", 0)
    told(spans, 2)
    assert until(lambda: not spans._thread.is_alive())
    assert len(caplog.messages) == 1
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in caplog.messages[0]
    told(spans, 2)
    assert spans._waiting.empty()


def test_what_ends_with_a_rank_becomes_spans_still() -> None:
    taken = Taken()
    spans = TransferSpans("engine", 0, taken.tracer)
    spans.expect({R: PARENT})

    class Rank:
        deadline = 0.0

        def close(self, deadline: float) -> bool:
            self.deadline = deadline
            spans.tell(push())
            return False

    rank, deadline = Rank(), time.monotonic() + 2 * EDGE_S
    assert not end_traced(rank, spans, deadline)
    assert rank.deadline == deadline
    assert until(lambda: len(taken.named("kv_push")) == 1)
    assert until(lambda: not spans._thread.is_alive())


def test_a_tracer_that_fails_ends_the_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Tracer:
        raise ValueError

    spans = TransferSpans("engine", 0, broken)
    told(spans, 1)
    assert until(lambda: not spans._thread.is_alive())
    assert caplog.messages == ["spans end"]
    told(spans, 3)
    assert spans.close(time.monotonic())


def test_a_process_without_a_thread_to_spare_makes_no_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    spans = TransferSpans("engine", 0, Taken().tracer)
    monkeypatch.setattr(threading.Thread, "start", none_left)
    told(spans, 3)
    assert caplog.messages == ["spans not made reason=can't start new thread"]
    assert spans.close(time.monotonic())
