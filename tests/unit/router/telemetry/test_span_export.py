"""Spans on their way to a collector: what a collector does costs no request, and no memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from fakes.collector import spans_in
from patience import PATIENCE_S
from pdcluster_router.core.telemetry.request_trace import SpanIds
from pdcluster_router.telemetry.kept import KeptRow
from pdcluster_router.telemetry.otlp import Sent, SpanEncoder
from pdcluster_router.telemetry.span_export import MAX_BATCH_BYTES, MAX_QUEUED_BYTES, TRIES, SpanExport

IDS: Final = SpanIds("0af7651916cd43dd8448eb211c80319c", 0x100)
ROW: Final = KeptRow("R", path=b"/v1/completions", outcome="ok", status=200, total_s=1.0, queue_s=0.1)
PAUSE_S: Final = 0.001


class Taker:
    """A collector without a network."""

    problem = "it is full of 10.0.0.1:4318"

    def __init__(self, *answers: Sent, num_rejected: int = 0) -> None:
        self.answers = list(answers)
        self.num_rejected = num_rejected
        self.bodies: list[bytes] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_closed = False

    def post(self, body: bytes) -> tuple[Sent, int]:
        self.bodies.append(body)
        assert self.may_answer.wait(PATIENCE_S)
        return (self.answers.pop(0) if self.answers else Sent.TAKEN), self.num_rejected

    def close(self) -> None:
        self.is_closed = True


class Lost:
    """Counts what is lost."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int) -> None:
        self.number += number


@contextmanager
def exporting(taker: Any, lost: Callable[[int], None]) -> Iterator[SpanExport]:
    export = SpanExport(taker, SpanEncoder({"service.name": "r"}), "https", lost, PAUSE_S, close_s=PATIENCE_S)
    try:
        yield export
    finally:
        export.close()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_spans_of_several_requests_are_one_message_that_opentelemetry_reads() -> None:
    encoder = SpanEncoder({"service.name": "r"})
    taker = Taker()
    export = SpanExport(taker, encoder, "https", Lost(), pause_s=PATIENCE_S, close_s=PATIENCE_S)
    export.add(IDS, ROW, 1_000_000.5)
    export.add(SpanIds("f" * 32, 0x900, 0x1), ROW, 1_000_000.5)
    export.close()
    (body,) = taker.bodies
    spans = spans_in(body)
    assert [(one.trace_id, one.name) for one in spans] == [
        (IDS.trace_id, "POST /v1/completions"),
        (IDS.trace_id, "queue"),
        ("f" * 32, "POST /v1/completions"),
        ("f" * 32, "queue"),
    ]
    assert [one.parent_id for one in spans] == ["", f"{0x100:016x}", f"{1:016x}", f"{0x900:016x}"]
    assert [spans[0].begin_ns, spans[0].end_ns] == [1_000_000_500_000_000, 1_000_001_500_000_000]
    assert spans[0].attributes["url.scheme"] == "https"
    assert spans[0].resource == {"service.name": "r"}
    assert taker.is_closed


def test_a_collector_that_stands_still_holds_up_nothing_and_costs_bounded_memory() -> None:
    taker, lost = Taker(), Lost()
    taker.may_answer.clear()
    row = KeptRow("R", path=b"/v1/completions", moments=(0.1, "prefill_failed", "prefill-0", 1, "x" * 30_000))
    with exporting(taker, lost) as export:
        export.add(IDS, ROW, 1.0)
        until(lambda: bool(taker.bodies))
        num_added = 3 * MAX_QUEUED_BYTES // 30_000
        for _ in range(num_added):
            export.add(IDS, row, 1.0)
        num_lost = lost.number
        taker.may_answer.set()
        until(lambda: not export._ended)
    assert 0 < num_lost < num_added
    assert (num_added - num_lost) * 30_000 <= MAX_QUEUED_BYTES
    assert all(len(body) <= 2 * MAX_BATCH_BYTES for body in taker.bodies)
    assert lost.number == num_lost


def test_more_than_the_queue_holds_passes_it_in_time() -> None:
    taker, lost = Taker(), Lost()
    row = KeptRow("R", path=b"/v1/completions", moments=(0.1, "prefill_failed", "prefill-0", 1, "x" * (1 << 20)))
    with exporting(taker, lost) as export:
        for _ in range(2 * MAX_QUEUED_BYTES >> 20):
            export.add(IDS, row, 1.0)
            until(lambda: not export._ended)
    assert lost.number == 0


def test_a_name_of_a_model_as_long_as_a_body_is_not_kept_so_long() -> None:
    taker = Taker()
    with exporting(taker, Lost()) as export:
        export.add(IDS, KeptRow("R", path=b"/v1/completions", model_text=b'"' + b"m" * (8 << 20) + b'"'), 1.0)
        until(lambda: bool(taker.bodies))
    assert spans_in(taker.bodies[0])[0].attributes["gen_ai.request.model"] == "?"


def test_a_dead_collector_is_tried_again_and_then_its_spans_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    taker, lost = Taker(*[Sent.AGAIN] * TRIES * 2), Lost()
    caplog.set_level(logging.WARNING)
    with exporting(taker, lost) as export:
        for number in (1, 2):
            export.add(IDS, ROW, 1.0)
            until(lambda wanted=number: lost.number == wanted)  # type: ignore[misc]  # its default is the number
        export.add(IDS, ROW, 1.0)
        until(lambda: len(caplog.messages) == 2)
    assert len(taker.bodies) == 2 * TRIES + 1
    assert caplog.messages == [
        "spans are lost reason=it is full of <address>: see that the collector of --otlp-endpoint takes them",
        "spans are sent again",
    ]


def test_a_refused_batch_is_lost_at_once() -> None:
    taker, lost = Taker(Sent.REFUSED), Lost()
    with exporting(taker, lost) as export:
        export.add(IDS, ROW, 1.0)
        until(lambda: lost.number == 1)
    assert len(taker.bodies) == 1


def test_rejected_spans_are_counted_but_never_as_more_requests_than_were_sent() -> None:
    taker, lost = Taker(num_rejected=1000), Lost()
    with exporting(taker, lost) as export:
        export.add(IDS, ROW, 1.0)
        until(lambda: lost.number == 1)


def test_a_request_whose_spans_cannot_be_made_costs_no_other_its_spans() -> None:
    taker, lost = Taker(), Lost()
    with exporting(taker, lost) as export:
        export.add(SpanIds("no digits", 0x100), ROW, 1.0)
        export.add(IDS, ROW, 1.0)
        until(lambda: bool(taker.bodies))
    assert lost.number == 1
    assert {span.trace_id for span in spans_in(b"".join(taker.bodies))} == {IDS.trace_id}


def test_what_finds_the_queue_full_is_told_in_the_log_though_the_collector_takes_all_that_it_gets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    taker, lost = Taker(), Lost()
    taker.may_answer.clear()
    row = KeptRow("R", path=b"/v1/completions", moments=(0.1, "prefill_failed", "prefill-0", 1, "x" * (1 << 20)))
    with exporting(taker, lost) as export:
        export.add(IDS, ROW, 1.0)
        until(lambda: bool(taker.bodies))
        for _ in range(9):
            export.add(IDS, row, 1.0)
        assert lost.number > 0
        taker.may_answer.set()
        until(lambda: len(caplog.messages) == 2)
    assert caplog.messages == [
        "spans are lost reason=it takes them too slowly: see that the collector of --otlp-endpoint takes them",
        "spans are sent again",
    ]


def test_what_is_left_is_sent_at_the_end() -> None:
    taker = Taker()
    export = SpanExport(taker, SpanEncoder({}), "http", Lost(), pause_s=PATIENCE_S, close_s=PATIENCE_S)
    export.add(IDS, ROW, 1.0)
    export.close()
    assert len(taker.bodies) == 1


def test_what_a_slow_collector_has_not_taken_at_the_end_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    taker, lost = Taker(), Lost()
    taker.may_answer.clear()
    export = SpanExport(taker, SpanEncoder({"service.name": "r"}), "https", lost, PAUSE_S, close_s=0.0)
    export.add(IDS, ROW, 1.0)
    until(lambda: bool(taker.bodies))
    export.add(IDS, ROW, 1.0)
    export.close()
    assert (lost.number, "spans are lost requests=2" in caplog.text) == (2, True)
    taker.may_answer.set()
    until(lambda: taker.is_closed)
    assert lost.number == 2


def test_what_is_being_made_when_the_router_ends_is_counted_too() -> None:
    lost, is_making, may_go_on = Lost(), threading.Event(), threading.Event()

    class SlowEncoder(SpanEncoder):
        def encode(self, *args: Any) -> bytes:
            is_making.set()
            assert may_go_on.wait(PATIENCE_S)
            return super().encode(*args)

    taker = Taker()
    export = SpanExport(taker, SlowEncoder({"service.name": "r"}), "https", lost, PATIENCE_S, close_s=0.0)
    for _ in range(3):
        export.add(IDS, ROW, 1.0)
    export._is_closing.set()
    assert is_making.wait(PATIENCE_S)
    export.close()
    assert lost.number == 3
    may_go_on.set()
    until(lambda: taker.is_closed)
