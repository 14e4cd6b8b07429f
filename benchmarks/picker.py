"""Measures what asking the picker adds: a real Envoy with the router as its picker, beside the same Envoy without.

    .venv/bin/python -m benchmarks.picker [--seconds 3] [--connections 16] [--rounds 3]

Engines, router and both Envoys are processes of their own, the load comes from this one. All share the machine's cores,
so read ratios and differences. In each round each way has its turn, the first one another time, and differences are of
one round. Ways to a decode engine that computes the prompt itself (nothing is handed over):

    envoy      Envoy alone, straight to the engine
    own door   the router itself
    unread     Envoy asks; the answer goes by the router
    duplex     Envoy asks, and each piece of the answer goes to the router and back
    buffered   Envoy asks; requests are given in one message

and with a hand-over: *pair door*, *pair unread* and *pair duplex*.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
import yaml
from benchmarks.figures import format_table
from benchmarks.router import LOCAL, PAIR, PATH, Result, load, spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from gateway.envoy import config_for, find_envoy
from integration.ports import fresh_port

BASE: Final = "envoy"
_START_S: Final = 60.0
_WARM_S: Final = 0.3
_STRAIGHT_MS: Final = 1e-3
_MODES: Final[dict[str, dict[str, str]]] = {
    "unread": {"response_body_mode": "NONE"},
    "duplex": {},
    "buffered": {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"},
}
COLUMNS: Final = ("connections", "way", "requests/s", "p50 ms", "p99 ms", "added p50 ms", "p50 / envoy's")


@dataclass(frozen=True, slots=True)
class Way:
    """Where requests of a way go, and what they ask for."""

    name: str
    url: str
    body: bytes


@contextmanager
def running_envoy(picker_port: int, engine_url: str, *, has_picker: bool, modes: dict[str, Any]) -> Iterator[str]:
    """The URL of an Envoy before one engine."""
    port = fresh_port()
    config = config_for(port, picker_port, [engine_url], has_picker=has_picker, **modes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "envoy.yaml"
        file.write_text(yaml.safe_dump(config))
        options = ["--concurrency", "1", "--disable-hot-restart", "-l", "error"]
        process = subprocess.Popen([find_envoy(), "-c", file, *options])
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@contextmanager
def running_child(*args: str) -> Iterator[str]:
    """The URL that a child's first line ends with."""
    child, url = spawn(*args)
    try:
        yield url
    finally:
        child.terminate()
        child.wait()


def start_all(stack: ExitStack) -> list[Way]:
    """Starts engines, router and Envoys, and returns the ways through them."""
    engine = stack.enter_context(running_child("-m", "benchmarks.router", "--engines"))
    port = fresh_port()
    flags = ["--prefill", engine, "--decode", engine, "--port", "0", "--picker-port", str(port)]
    door = stack.enter_context(running_child("-m", "pdcluster_router", *flags))
    alone = stack.enter_context(running_envoy(port, engine, has_picker=False, modes={}))
    asking = {
        name: stack.enter_context(running_envoy(port, engine, has_picker=True, modes=modes))
        for name, modes in _MODES.items()
    }
    ways = [Way(BASE, alone, LOCAL), Way("own door", door, LOCAL)]
    ways += [Way(name, url, LOCAL) for name, url in asking.items()]
    return [
        *ways,
        Way("pair door", door, PAIR),
        *(Way(f"pair {name}", asking[name], PAIR) for name in ("unread", "duplex")),
    ]


async def measure(ways: Sequence[Way], connections: int, seconds: float, num_rounds: int) -> list[list[str]]:
    """The rows of the table for one number of connections."""
    results: dict[str, list[Result]] = {way.name: [] for way in ways}
    for number in range(num_rounds):
        for way in (*ways[number % len(ways) :], *ways[: number % len(ways)]):
            await load(way.url, way.body, connections, _WARM_S)
            results[way.name].append(await load(way.url, way.body, connections, seconds))
    return [row_of(connections, name, found, results[BASE]) for name, found in results.items()]


def row_of(connections: int, name: str, found: Sequence[Result], base: Sequence[Result]) -> list[str]:
    """Medians over rounds; what is added is worked out in each round, beside its least and most."""
    added = [(one.p50_us - other.p50_us) * _STRAIGHT_MS for one, other in zip(found, base, strict=True)]
    ratio = [one.p50_us / other.p50_us for one, other in zip(found, base, strict=True)]
    rate, p50, p99 = (
        statistics.median(getattr(one, field) for one in found) for field in ("requests_per_s", "p50_us", "p99_us")
    )
    spread = f"{statistics.median(added):.2f} ({min(added):.2f}..{max(added):.2f})"
    times = [f"{p50 * _STRAIGHT_MS:.2f}", f"{p99 * _STRAIGHT_MS:.2f}"]
    return [str(connections), name, f"{rate:.0f}", *times, spread, f"{statistics.median(ratio):.2f}"]


def wait_until_served(ways: Sequence[Way]) -> None:
    """Every way answers. Raises: OSError: One does not within ``_START_S``."""
    deadline = time.monotonic() + _START_S
    for way in ways:
        request = urllib.request.Request(way.url + PATH, way.body, {"content-type": "application/json"})
        while True:
            try:
                urllib.request.urlopen(request, timeout=_START_S).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


async def compare(ways: Sequence[Way], connections: int, seconds: float, num_rounds: int) -> None:
    rows = [row for number in (1, connections) for row in await measure(ways, number, seconds, num_rounds)]
    print(format_table(COLUMNS, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with ExitStack() as stack:
        ways = start_all(stack)
        wait_until_served(ways)
        uvloop.run(compare(ways, given.connections, given.seconds, given.rounds))


if __name__ == "__main__":
    main()
