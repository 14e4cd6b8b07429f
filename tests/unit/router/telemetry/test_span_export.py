"""Spans on their way to a collector: what a collector does costs no request, and no memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from fakes.collector import FakeCollector, running_collector, spans_in
from patience import PATIENCE_S
from pdcluster_router.core.telemetry.request_trace import SpanIds
from pdcluster_router.telemetry.kept import KeptRow
from pdcluster_router.telemetry.otlp import MAX_ANSWER_BYTES, Sent, SpanCollector, SpanEncoder
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
    export = SpanExport(taker, SpanEncoder({"service.name": "r"}), "https", lost, PAUSE_S)
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
    export = SpanExport(taker, encoder, "https", Lost(), pause_s=PATIENCE_S)
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
    export = SpanExport(taker, SpanEncoder({}), "http", Lost(), pause_s=PATIENCE_S)
    export.add(IDS, ROW, 1.0)
    export.close()
    assert len(taker.bodies) == 1


# Collectors over real sockets.


def saying(*pieces: bytes) -> Callable[[Any], None]:
    def answer(wire: Any) -> None:
        for piece in pieces:
            wire.write(piece)

    return answer


def head(status: str, num_bytes: int = 0, *lines: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n%b\r\n" % (status.encode(), num_bytes, b"".join(lines))


def posted(fake: FakeCollector, times: int = 1) -> list[tuple[Sent, int]]:
    collector = SpanCollector(fake.url + "/v1/traces", {"x-key": "sesame"}, None)
    try:
        return [collector.post(b"") for _ in range(times)]
    finally:
        collector.close()


def test_headers_and_path_are_the_collectors() -> None:
    with running_collector() as fake:
        assert posted(fake, 2) == [(Sent.TAKEN, 0)] * 2
        assert fake.paths == ["/v1/traces"] * 2
        assert (fake.headers[0]["x-key"], fake.headers[0]["content-type"]) == ("sesame", "application/x-protobuf")


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        ("302 Found", Sent.REFUSED),
        ("401 Unauthorized", Sent.REFUSED),
        ("429 Too Many", Sent.AGAIN),
        ("500 Oh", Sent.REFUSED),
        ("503 Wait", Sent.AGAIN),
    ],
)
def test_no_other_status_than_200_is_success(status: str, sent: Sent) -> None:
    with running_collector() as fake:
        fake.answer = saying(head(status))
        assert posted(fake) == [(sent, 0)]


def test_an_answer_without_an_end_is_read_no_further_than_some_kib() -> None:
    num_written = 0

    def endless(wire: Any) -> None:
        nonlocal num_written
        wire.write(head("200 OK", 1 << 40))
        try:
            while num_written < 1 << 28:
                num_written += wire.write(b"x" * 65536)
        except OSError:
            pass

    with running_collector() as fake:
        fake.answer = endless
        assert posted(fake, 2) == [(Sent.TAKEN, 0)] * 2
    assert num_written < 1 << 28, "the router went on reading"
    assert MAX_ANSWER_BYTES < 1 << 20


def test_rejected_spans_are_told() -> None:
    said = b"\x0a\x0b\x08\x03\x12\x07no room"  # partial_success: rejected_spans 3, error_message
    with running_collector() as fake:
        fake.answer = saying(head("200 OK", len(said)), said)
        assert posted(fake) == [(Sent.TAKEN, 3)]


@pytest.mark.parametrize("said", [b"<html>", b"\xff" * 9, b"{}"])
def test_words_that_are_no_otlp_are_no_failure(said: bytes) -> None:
    with running_collector() as fake:
        fake.answer = saying(head("200 OK", len(said)), said)
        assert posted(fake) == [(Sent.TAKEN, 0)]


@pytest.mark.parametrize("bytes_", [b"", b"no http\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"x" * (1 << 17)])
def test_an_answer_that_is_no_http_is_a_failure_that_may_pass(bytes_: bytes) -> None:
    def answer(wire: Any) -> None:
        wire.write(bytes_)
        wire.close()
        raise ConnectionError

    with running_collector() as fake:
        fake.answer = answer
        assert posted(fake)[0][0] is Sent.AGAIN


@pytest.mark.parametrize(
    ("head_", "endless"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
    ],
    ids=["heads", "trailers"],
)
def test_an_answer_whose_head_or_trailer_has_no_end_is_read_no_further_than_some_kib(
    head_: bytes, endless: bytes
) -> None:
    """Else the thread would take a core, and Python's lock with it, for as long as the collector likes."""
    num_written = 0

    def answer(wire: Any) -> None:
        nonlocal num_written
        wire.write(head_)
        try:
            while num_written < 1 << 24:
                num_written += wire.write(endless * 4096)
        except OSError:
            pass
        wire.close()
        raise ConnectionError

    with running_collector() as fake:
        fake.answer = answer
        assert posted(fake)[0][0] is Sent.AGAIN
    assert num_written < 1 << 24, "the router went on reading"


def test_an_answer_that_comes_byte_by_byte_is_given_up_in_time() -> None:
    has_hung_up = threading.Event()

    def drips(wire: Any) -> None:
        wire.write(b"HTTP/1.1 200 OK\r\nx: ")
        try:
            while True:
                wire.write(b"y")
                time.sleep(0.01)
        except OSError:
            has_hung_up.set()
            raise

    with running_collector() as fake:
        fake.answer = drips
        collector = SpanCollector(fake.url + "/v1/traces", {}, None, timeout_s=0.2)
        assert collector.post(b"")[0] is Sent.AGAIN
        assert has_hung_up.wait(PATIENCE_S)


def test_a_connection_that_the_collector_has_ended_meanwhile_costs_no_try() -> None:
    """Else the last spans of a router that stops are lost, since there is no time for another try."""

    def takes_one(wire: Any) -> None:
        wire.write(head("200 OK"))
        wire.close()
        raise ConnectionError

    with running_collector() as fake:
        fake.answer = takes_one
        assert posted(fake, 3) == [(Sent.TAKEN, 0)] * 3


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://c..svc:4318/v1/traces", {}),
        ("http://127.0.0.1:1/\u00e9", {}),
        ("http://127.0.0.1:1/", {"x-key": "sesame\n"}),
    ],
)
def test_what_cannot_be_sent_ends_no_thread_and_tells_no_secret(url: str, headers: dict[str, str]) -> None:
    collector = SpanCollector(url, headers, None)
    assert collector.post(b"") == (Sent.REFUSED, 0)
    assert collector.problem
    assert "sesame" not in collector.problem


@pytest.mark.parametrize(("url", "port"), [("http://[::1]/x", 80), ("https://[::1]/x", 443), ("http://[::1]:7/x", 7)])
def test_an_ipv6_address_needs_no_port(url: str, port: int) -> None:
    connection = SpanCollector(url, {}, None)._connect()
    assert (connection.host, connection.port) == ("::1", port)


def test_a_collector_that_nobody_runs_is_tried_again() -> None:
    collector = SpanCollector("http://127.0.0.1:1/v1/traces", {}, None)
    assert collector.post(b"")[0] is Sent.AGAIN
    assert "refused" in collector.problem.lower()


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
