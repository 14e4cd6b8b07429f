"""Ports for what tests start: nobody else's, also when groups of tests run side by side.

A port that the kernel gives away is free only until somebody else asks, and an engine binds it two seconds later. So
each worker of pytest-xdist has a range of its own, below the ports of outgoing connections (Linux: 32768 on) and of
Mooncake (15000 on), and goes round in it.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from typing import Final

from pdcluster_cli.engines import LOOPBACK

FIRST: Final = 10_000
PORTS_PER_WORKER: Final = 1_000
MAX_WORKERS: Final = 5


def range_of(worker: str) -> range:
    """The ports of one worker by pytest-xdist's name: ``gw1`` → 11000..11999; without workers the first range."""
    number = int(worker.removeprefix("gw") or 0)
    if number >= MAX_WORKERS:
        raise ValueError(f"worker {worker}: there are ports for {MAX_WORKERS} workers: run fewer")
    return range(FIRST + number * PORTS_PER_WORKER, FIRST + (number + 1) * PORTS_PER_WORKER)


def fresh_port() -> int:
    """A loopback port of this worker that nobody listens on, and that was not given before in a long time."""
    return next(port for port in itertools.islice(_ROUND, PORTS_PER_WORKER) if _is_free(port))


def _go_round() -> Iterator[int]:
    return itertools.cycle(range_of(os.environ.get("PYTEST_XDIST_WORKER", "gw0")))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


_ROUND: Final = _go_round()
