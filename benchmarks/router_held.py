"""Holds many streams at once, by prefill and decode: how many have all their events, and what they cost the router.

    .venv/bin/python -m benchmarks.router_held [--streams 10000] [--processes 4] [--interval-ms 2000] [--seconds 20]

The fake engines are one process, and this one has the clients. Each needs a descriptor for each stream, and each of the
router's processes about five for a client: docs/operations.md, "What clients may take". All share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop
from benchmarks.client import BenchmarkError
from benchmarks.router_contenders import OURS, Contender, Flow
from benchmarks.router_peers import beside_engines, closing, open_streams, resident_mb

_SLACK: Final = 0.8
"""The share of its events that a stream must have while it is looked at: the edges of the time cost one."""


@dataclass(frozen=True, slots=True)
class Held:
    """``num_live``: streams that had their events. ``megabytes``: of each process of the router, idle and then."""

    num_live: int
    idle: list[float]
    megabytes: list[float]


async def hold(num: int, flags: tuple[str, ...], interval_ms: int, seconds: float) -> Held:
    """Opens ``num`` streams, and looks at them for ``seconds``.

    Raises:
        BenchmarkError: A router or its engines do not answer.
    """
    contender = Contender(OURS, Flow.PREFILL_DECODE, module="pdcluster_router", flags=flags)
    with beside_engines(contender, 2, interval_ms) as (router, _):
        idle = [resident_mb(pid) for pid in processes_of(router.pid)]
        streams = await open_streams(router.url, contender.body, num)
        with closing(streams):
            before = [stream.num_events for stream in streams]
            await asyncio.sleep(seconds)
            least = _SLACK * seconds * 1e3 / interval_ms
            num_live = sum(one.num_events - past >= least for one, past in zip(streams, before, strict=True))
            return Held(num_live, idle, [resident_mb(pid) for pid in processes_of(router.pid)])


def processes_of(pid: int) -> Iterator[int]:
    """The process and all below it."""
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from processes_of(int(child))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=4, help="of the router")
    parser.add_argument("--interval-ms", type=int, default=2000, help="between two events of a stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which all are looked at")
    given = parser.parse_args()
    flags = (f"--processes={given.processes}",) if given.processes > 1 else ()
    try:
        held = uvloop.run(hold(given.streams, flags, given.interval_ms, given.seconds))
    except (BenchmarkError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    sizes = (", ".join(f"{size:.0f}" for size in one) for one in (held.idle, held.megabytes))
    print(f"{held.num_live:,} of {given.streams:,} streams had their events, on {os.cpu_count()} cores")
    print("MB of each process of the router: {} idle, {} with the streams".format(*sizes))
    return 0 if held.num_live == given.streams else 1


if __name__ == "__main__":
    sys.exit(main())
