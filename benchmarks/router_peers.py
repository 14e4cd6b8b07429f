"""Compares the costs of several routers, in turns in one run: CPU of a request and of an event, memory, added time.

    .venv/bin/python -m benchmarks.router_peers [--rounds 3] [--seconds 4] [--many 256] [--quick] [--write]

The fake engines are one process, this process makes the load, and the kernel counts each router's CPU time. So neither
engines nor load limit a figure: *requests/s of a core* is requests over the router's own CPU seconds. Requests at a
fixed rate show the time that a router adds. All share the machine's cores: times need a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httptools
import uvloop
from benchmarks.client import BenchmarkError
from benchmarks.figures import DOCS, format_table, ratios, write_page
from benchmarks.places import free_port
from benchmarks.router import ANSWER_BODY, LOCAL, PATH, Peer, cpu_seconds, load, request_bytes
from benchmarks.router_contenders import CONTENDERS, OURS, SETUP, Contender, Flow, Running, running
from benchmarks.router_gates import GATE_COLUMNS, Figures, rows_of_gates
from benchmarks.router_plot import draw

LARGE_TOKENS: Final = 100_000
CHARS_PER_TOKEN: Final = 4
NUM_STREAMS: Final = 200
STREAM_INTERVAL_MS: Final = 20
NUM_HELD: Final = 1000
AT_ONCE: Final = 250
"""Streams that are opened together: a thousand at once would also show what their prompts cost for a moment."""
RATE_PER_S: Final = 100
"""The request rate of the time measurement: far below the capacity of each router."""


class StreamCount(asyncio.Protocol):
    """A client of a stream that counts events, and sends its request again after the last event."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.num_events = 0
        self.has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.has_begun = True  # Also with an error: then it has no event.
        self.num_events += data.count(b"data: ")
        if data.endswith(b"0\r\n\r\n"):
            self.transport.write(self._request)


def widened(body: bytes, **fields: object) -> bytes:
    """The JSON body with more or other fields."""
    return json.dumps({**json.loads(body), **fields}).encode()


async def cpu_of(pid: int, measured: Callable[[], Awaitable[int]]) -> float:
    """CPU microseconds of the process for each of the requests or events that ``measured`` counts.

    Raises:
        BenchmarkError: It counts none."""
    before = cpu_seconds(pid)
    num = await measured()
    if not num:
        raise BenchmarkError("nothing came while it was measured")
    return (cpu_seconds(pid) - before) * 1e6 / num


async def requests_of(url: str, body: bytes, num_connections: int, seconds: float) -> int:
    return (await load(url, body, num_connections, seconds)).num_requests


def abort(clients: Sequence[StreamCount]) -> None:
    for client in clients:
        client.transport.abort()


@contextmanager
def closing(clients: Sequence[StreamCount]) -> Iterator[None]:
    try:
        yield
    finally:
        abort(clients)


async def open_streams(url: str, body: bytes, num: int) -> list[StreamCount]:
    """Opens ``num`` streams, ``AT_ONCE`` of them together, and returns when all have begun. Waits up to 60 s for each
    part of them.

    Raises:
        TimeoutError: Some stream has not begun by then.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    loop = asyncio.get_running_loop()
    request = request_bytes(PATH, widened(body, stream=True))
    clients: list[StreamCount] = []
    with ExitStack() as stack:
        stack.callback(abort, clients)
        while len(clients) < num:
            for _ in range(min(AT_ONCE, num - len(clients))):
                made = await loop.create_connection(lambda: StreamCount(request), host, int(port))
                clients.append(made[1])
            async with asyncio.timeout(60):
                while not all(client.has_begun for client in clients[-AT_ONCE:]):
                    await asyncio.sleep(0.01)
        stack.pop_all()
    return clients


async def events_of(clients: Sequence[StreamCount], seconds: float) -> int:
    before = sum(client.num_events for client in clients)
    await asyncio.sleep(seconds)
    return sum(client.num_events for client in clients) - before


async def times_at_a_rate(url: str, body: bytes, seconds: float) -> tuple[float, float]:
    """p50 and p99 (us) of answers to requests at ``RATE_PER_S``, over connections that are open already."""
    host, _, port = url.removeprefix("http://").partition(":")
    loop = asyncio.get_running_loop()
    idle: list[Peer] = []
    sent_at: dict[Peer, float] = {}
    times: list[float] = []

    def answered(peer: Peer, answer: bytes) -> None:
        assert answer == ANSWER_BODY, answer
        times.append(time.perf_counter() - sent_at.pop(peer))
        idle.append(peer)

    for _ in range(16):
        made = await loop.create_connection(lambda: Peer(httptools.HttpResponseParser, answered), host, int(port))
        idle.append(made[1])
    request = request_bytes(PATH, body)
    for _ in range(int(seconds * RATE_PER_S)):
        if idle:
            peer = idle.pop(0)
            sent_at[peer] = time.perf_counter()
            peer.transport.write(request)
        await asyncio.sleep(1 / RATE_PER_S)
    for peer in [*idle, *sent_at]:
        peer.transport.close()
    cuts = statistics.quantiles(times, n=100)
    return cuts[49] * 1e6, cuts[98] * 1e6


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def small_us(router: Running, seconds: float) -> float:
    """CPU of a request with a prompt of 1 KB, after half a second of such requests."""
    body, url = router.contender.body, router.url
    await load(url, body, 64, 0.5)
    return await cpu_of(router.pid, lambda: requests_of(url, body, 64, seconds))


async def measure(router: Running, engine: str, seconds: float, figures: Figures) -> None:
    """One round of one contender."""
    body, url, pid = router.contender.body, router.url, router.pid
    figures.small_us.append(await small_us(router, seconds))
    large = widened(body, prompt="word " * (LARGE_TOKENS * CHARS_PER_TOKEN // 5))
    figures.large_us.append(await cpu_of(pid, lambda: requests_of(url, large, 8, seconds)))
    straight = await times_at_a_rate(engine, LOCAL, seconds)
    through = await times_at_a_rate(url, body, seconds)
    figures.added_p50_us.append(through[0] - straight[0])
    figures.added_p99_us.append(through[1] - straight[1])
    streams = await open_streams(url, body, NUM_STREAMS)
    with closing(streams):
        await asyncio.sleep(0.5)
        figures.chunk_us.append(await cpu_of(pid, lambda: events_of(streams, seconds)))
    held = await open_streams(url, body, NUM_HELD)
    with closing(held):
        await asyncio.sleep(1)
        if num_refused := sum(not stream.num_events for stream in held):
            raise BenchmarkError(f"{num_refused} of {NUM_HELD} streams have no event")
        figures.held_mb.append(resident_mb(pid))


def fake_engines(
    flow: Flow, num: int, interval_ms: int = STREAM_INTERVAL_MS
) -> tuple[subprocess.Popen[str], list[str]]:
    """Starts the engines. Returns their process and URLs; in a flow with two roles, prefill's come first."""
    num_prefill = num // 2 if flow is Flow.PREFILL_DECODE else 0
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.router_engines", str(num_prefill), str(num), str(interval_ms)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # sglang-router tries HTTP/2 first.
        text=True,
    )
    assert child.stdout is not None
    return child, [child.stdout.readline().strip() for _ in range(num)]


@contextmanager
def beside_engines(
    contender: Contender, num_engines: int, interval_ms: int = STREAM_INTERVAL_MS
) -> Iterator[tuple[Running, str]]:
    """The router and its engines answer until the block ends. Gives the router, and the last engine's URL.

    Raises:
        BenchmarkError: What is measured in the block fails: says of which router.
    """
    child, urls = fake_engines(contender.flow, num_engines, interval_ms)
    with ExitStack() as stack:
        stack.callback(child.wait)
        stack.callback(child.kill)
        router = stack.enter_context(running(contender, urls, (free_port(), free_port())))
        try:
            yield router, urls[-1]
        except (BenchmarkError, TimeoutError) as error:
            raise BenchmarkError(f"{contender.name}, {contender.flow.value}: {error or 'no answer'}") from error


async def compare(
    contenders: Sequence[Contender], num_engines: int, num_many: int, rounds: int, seconds: float
) -> dict[Contender, Figures]:
    """Measures each contender in each round. The order is reversed from round to round."""
    found = {contender: Figures() for contender in contenders}
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            with beside_engines(contender, num_engines) as (router, engine):
                await measure(router, engine, seconds, found[contender])
            if contender.name == OURS and num_many:
                with beside_engines(contender, num_many) as (router, _):
                    found[contender].many_us.append(await small_us(router, seconds))
    return found


COLUMNS: Final = (
    "flow",
    "router",
    "requests/s of a core",
    "CPU us, 100,000 tokens",
    "CPU us of an event",
    "MB, 1,000 streams",
    "added p50 us",
    "added p99 us",
    "requests/s beside ours",
)


EXPLAINED: Final = """Fake engines answer at once.

![Figures of all routers](router-peers.png)

- *One hop*: the router relays a request to one engine. *P/D*: prefill and decode work on it, as each router does that.
- *Requests/s of a core*: requests divided by the router's own CPU seconds; prompts of 1 KB, 64 connections.
- *100,000 tokens*: 400 KB of text, 8 connections. *An event*: 200 streams have one every 20 ms.
- *1,000 streams*: opened 250 at a time.
- *Added*: time beyond the engine's own, at 100 requests/s. Less than nothing is the machine's noise.
- *Beside ours*: requests/s of a core divided by ours of the same round, median (least..most)."""


def rows_of(found: Mapping[Contender, Figures]) -> list[tuple[str, ...]]:
    """A row for each contender: medians over the rounds, and ratios to ours in the same round."""
    rows = []
    for contender, figures in found.items():
        ours = next((f for c, f in found.items() if c.name == OURS and c.flow is contender.flow), figures)
        ratio = ratios(ours.small_us, figures.small_us)
        rows.append(
            (
                contender.flow.value,
                contender.name,
                f"{1e6 / statistics.median(figures.small_us):,.0f}",
                *(f"{statistics.median(values):,.0f}" for values in (figures.large_us,)),
                f"{statistics.median(figures.chunk_us):.1f}",
                *(
                    f"{statistics.median(values):,.0f}"
                    for values in (figures.held_mb, figures.added_p50_us, figures.added_p99_us)
                ),
                f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})",
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each of five measurements of a router")
    parser.add_argument("--engines", type=int, default=2, help="half of them are prefill's; at least 2")
    parser.add_argument("--many", type=int, default=256, help="ours is also measured with so many; 0: it is not")
    parser.add_argument("--routers", nargs="+", default=sorted({c.name for c in CONTENDERS}), help="by name")
    parser.add_argument("--quick", action="store_true", help="one round of a second each")
    parser.add_argument("--write", action="store_true", help="write docs/router-peers.md")
    given = parser.parse_args()
    rounds, seconds = (1, 1.0) if given.quick else (given.rounds, given.seconds)
    wanted = [contender for contender in CONTENDERS if contender.name in given.routers]
    here = [contender for contender in wanted if contender.is_here]
    if missing := sorted({c.name for c in wanted if not c.is_here}):
        print(f"not here: {', '.join(missing)} (nginx: your distribution's; the others: {SETUP})")
    try:
        found = uvloop.run(compare(here, given.engines, given.many, rounds, seconds))
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    table = format_table(COLUMNS, rows_of(found))
    gates = format_table(GATE_COLUMNS, rows_of_gates(found, given.many))
    print(table, gates, sep="\n\n")
    if given.write:
        words = f"{rounds} rounds of {seconds:g} s for each measurement, {given.engines} engines, medians."
        write_page("router_peers", "Routers beside each other", f"{words} {EXPLAINED}\n\n{table}\n\n## Gates\n{gates}")
        draw(found, DOCS / "router-peers.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
