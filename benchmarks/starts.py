"""Measures a start of router and operator: seconds until it serves or leads, processor time, memory.

    .venv/bin/python -m benchmarks.starts

The router knows one engine of each role by its flags and asks no API server. The operator takes the Lease of a fresh
API server with the chart's objects in it (``make kube``), and finds no PDCluster. Seconds run from the process's start
to the router's first line, and until the operator's metrics say that it leads (asked ten times a second).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
from benchmarks.operator_plane import OperatorProcess, install_chart, read_usage, running_plane
from benchmarks.router import spawn

COLUMNS: Final = ("part", "seconds", "CPU s", "MiB")
_ENGINE: Final = "http://127.0.0.1:9"
_NO_ROUTER: Final = 9
"""A router's port for verifications. Without a PDCluster the operator asks no router."""


class Start(NamedTuple):
    """One start of one part. ``mib``: resident memory when it is ready."""

    part: str
    seconds: float
    cpu_s: float
    mib: float


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("{:>9} {:>8} {:>7} {:>6}".format(*COLUMNS), flush=True)
    for start in _starts():
        print("{:>9} {:>8.2f} {:>7.2f} {:>6.1f}".format(*start), flush=True)


def _starts() -> Iterator[Start]:
    yield _start_router()
    with tempfile.TemporaryDirectory(prefix="pdcluster-starts-") as folder:
        yield _start_operator(Path(folder))


def _start_router() -> Start:
    begun_at = time.monotonic()
    router, _ = spawn("-m", "pdcluster_router", "--prefill", _ENGINE, "--decode", _ENGINE, "--port", "0")
    try:
        return _read("router", router.pid, begun_at)
    finally:
        router.kill()
        router.wait()


def _start_operator(folder: Path) -> Start:
    with running_plane(folder) as plane:
        install_chart(plane)
        begun_at = time.monotonic()
        operator = OperatorProcess(plane, folder, _NO_ROUTER)
        try:
            asyncio.run(_wait_leading(operator))
            return _read("operator", operator.pid, begun_at)
        finally:
            operator.kill()


async def _wait_leading(operator: OperatorProcess) -> None:
    async with aiohttp.ClientSession() as session:
        await operator.wait_until_leading(session)


def _read(part: str, pid: int, begun_at: float) -> Start:
    seconds, usage = time.monotonic() - begun_at, read_usage(pid)
    return Start(part, seconds, usage.cpu_s, usage.resident_mib)


if __name__ == "__main__":
    main()
