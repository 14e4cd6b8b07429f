"""Measures writes over TCP to a device whose own process computes: decode's steps while KV comes.

In ``copies.py`` the sender computes, as prefill does. Here the receiver computes, and the sender does not. So this also
holds for two devices, each with its own engine.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from multiprocessing.connection import Connection
from typing import Final

import torch
from tools.device_check.copies import LOADS, PIECES, Bench, Row, enter, in_a_process, open_bench, print_tables
from tools.device_check.where import asked_device

TARGETS: Final = ("device", "host")
_ALONE_S: Final = 0.3
"""Seconds of the receiver's steps without writes."""
_AHEAD_S: Final = 0.1
"""Seconds for which its steps run before the writes begin."""
_LEAST_S: Final = 0.2
"""The writes are repeated for so long: some 25 steps."""
NOW: Final = "now"


def main() -> int:
    where = asked_device()
    print_tables({size: in_a_process(where, size, measure_all) for size in PIECES[:2]})
    return 0


def measure_all(where: torch.device, _: int, pipe: Connection) -> None:
    """Send a line for each target and load, and a summary."""
    enter(where)
    loads = LOADS if where.type != "cpu" else LOADS[:2]
    with open_bench(where) as bench:
        rows = [measure(bench, target, load) for target, load in product(TARGETS, loads)]
    pipe.send([*(row.line for row in rows), _summary(rows)])


def measure(bench: Bench, target: str, load: str) -> Row:
    """Write everything, at least once, while the receiver runs steps of ``load``."""
    took: list[float] = []

    def write() -> None:
        took.append(bench.write_s("device", target, threading.Event()))

    without_s = with_s = 0.0
    if load == "none":
        write()
    else:
        without_s = while_it_computes(bench.child, load, lambda: time.sleep(_ALONE_S))
        with_s = while_it_computes(bench.child, load, write)
    mib = bench.sources["device"].numel() >> 20
    return Row("device", target, load, mib / statistics.median(took), 1e3 * with_s, 1e3 * without_s)


def while_it_computes(child: Connection, load: str, work: Callable[[], object]) -> float:
    """Do ``work`` again and again while the receiver runs steps. Returns the median seconds of the steps meanwhile."""
    child.send(load)
    time.sleep(_AHEAD_S)
    child.send(NOW)
    end = time.monotonic() + _LEAST_S
    work()
    while time.monotonic() < end:
        work()
    child.send("")
    if not child.poll(30.0):
        raise AssertionError("the receiver does not end its steps")
    median_s: float = child.recv()
    return median_s


def _summary(rows: list[Row]) -> str:
    idle, busy = rows[0], rows[len(rows) // len(TARGETS) - 1]
    ratio = busy.with_ms / busy.without_ms
    return f"{idle.mib_s:.0f} MiB/s, {busy.mib_s:.0f} beside the receiver's kernels, whose step takes {ratio:.2f} times"


if __name__ == "__main__":
    sys.exit(main())
