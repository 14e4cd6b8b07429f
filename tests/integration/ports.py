"""Ports for what tests start: nobody else's, also when several suites run side by side on one machine.

A port that the kernel gives away is free only until somebody else asks, and an engine binds it two seconds later. So
each process that asks claims a range of its own, below the ports of outgoing connections (Linux: 32768 on) and of
Mooncake (15000 on), and goes round in it. The claim is a name of an abstract socket: like ports, such names belong to
a network namespace, and the kernel gives them back however their process ends.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from functools import cache
from typing import Final

from pdcluster_cli.processes.engines import LOOPBACK

FIRST: Final = 10_000
PORTS_PER_RANGE: Final = 250
NUM_RANGES: Final = 20


def claim(number: int) -> socket.socket | None:
    """The claim on a range, for as long as the socket is open; None: another process has it."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0pdcluster-test-ports-{number}")
    except OSError:
        held.close()
        return None
    return held


def range_of(number: int) -> range:
    """The ports of one range."""
    return range(FIRST + number * PORTS_PER_RANGE, FIRST + (number + 1) * PORTS_PER_RANGE)


def fresh_port() -> int:
    """A loopback port that nobody listens on, of this process's range, and that was not given before in a long time."""
    return next(port for port in itertools.islice(_ports(), PORTS_PER_RANGE) if _is_free(port))


@cache
def _ports() -> Iterator[int]:
    for number in range(NUM_RANGES):
        held = claim(number)
        if held is not None:
            _HELD.append(held)
            return itertools.cycle(range_of(number))
    raise RuntimeError(f"{NUM_RANGES} processes of test suites have ports already: run fewer")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


_HELD: Final[list[socket.socket]] = []
"""Until this process ends."""
