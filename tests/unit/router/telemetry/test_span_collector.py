"""A collector over real sockets: what it answers, and what it does not, costs a bounded time and bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fakes.certificates import Authority
from fakes.collector import FakeCollector, running_collector
from patience import PATIENCE_S
from pdcluster_router.telemetry.otlp import MAX_ANSWER_BYTES, Sent, SpanCollector


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


@pytest.mark.parametrize("says_so", [True, False])
def test_a_tls_connection_that_the_collector_has_ended_meanwhile_costs_no_try(tmp_path: Path, *, says_so: bool) -> None:
    """``says_so``: it ends TLS as it should, and not the socket alone."""
    authority = Authority(tmp_path / "ca")

    def takes_one(wire: Any) -> None:
        wire.write(head("200 OK"))
        agreed = wire._sock
        if says_so:
            with suppress(OSError):
                agreed.unwrap()
        raise ConnectionError

    with running_collector(authority.issue().server(tmp_path)) as fake:
        fake.answer = takes_one
        collector = SpanCollector(fake.url + "/v1/traces", {}, authority.ca)
        assert [collector.post(b"x" * 100_000) for _ in range(4)] == [(Sent.TAKEN, 0)] * 4
        collector.close()


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
