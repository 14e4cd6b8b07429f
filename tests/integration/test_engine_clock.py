"""An engine's own clock, read beside a request: over real HTTP, with an engine that only counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from benchmarks.client import BenchmarkError, Server, prefill_seconds


class Engine:
    """Its metrics page, and nothing else."""

    def __init__(self) -> None:
        self.num_requests, self.seconds = 5, 10.0

    def take(self, seconds: float) -> None:
        self.num_requests += 1
        self.seconds += seconds

    def page(self) -> str:
        """Of two ranks, of which the first has nothing to do, with another figure of theirs."""
        name = "vllm:request_prefill_time_seconds"
        ranks = ((0, 2, 1.0), (1, self.num_requests, self.seconds))
        lines = [
            f'{name}_count{{engine="{rank}"}} {num}.0\n{name}_sum{{engine="{rank}"}} {s}' for rank, num, s in ranks
        ]
        return "\n".join([*lines, f'vllm:request_decode_time_seconds_sum{{engine="0"}} {9 * self.num_requests}\n'])


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = engine.page().encode()
            self.send_response(200)
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as in the base class
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield Server("127.0.0.1", http.server_port)
        http.shutdown()
        thread.join()


def test_what_one_request_took_is_what_the_clock_has_gained(engine: Engine, server: Server) -> None:
    assert prefill_seconds(server, lambda: engine.take(1.5)) == pytest.approx(1.5)


def test_a_request_that_is_reported_late_is_waited_for(engine: Engine, server: Server) -> None:
    late = threading.Timer(0.2, engine.take, [2.5])
    assert prefill_seconds(server, late.start) == pytest.approx(2.5)


@pytest.mark.parametrize("num_requests", [0, 2])
def test_another_number_of_requests_is_no_figure(engine: Engine, server: Server, num_requests: int) -> None:
    def ask() -> None:
        for _ in range(num_requests):
            engine.take(1.0)

    with pytest.raises(BenchmarkError, match=f"reported {num_requests} requests, not 1"):
        prefill_seconds(server, ask, reported_within_s=0.2)
