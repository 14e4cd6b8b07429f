"""Many requests of mixed sizes through real ranks: does memory, a thread or a descriptor grow?

    .venv/bin/python -m benchmarks.soak --write              20,000 requests, about 4 minutes; docs/soak.md
    .venv/bin/python -m benchmarks.soak --quick              600 requests
    .venv/bin/python -m benchmarks.soak --requests 200000    as many as one likes

Steps of 1 to 8 requests of 1 to 64 blocks go from TP 2 to TP 1. Pools like vLLM's hand their blocks out again and
again, and decode compares every byte. Resident memory, threads and descriptors of every rank's process are looked at 40
times, memory after the process has given its allocator's free pages back. The slope is over the last three quarters,
for each 1,000 requests. A process is flat when memory would grow by less than 1 MiB over all requests, or by less than
the spread of its calmer half. Threads and descriptors must also end as they were after the first quarter.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.block_tables import FreeBlocks
from benchmarks.kv_shape import KvShape
from benchmarks.pages import format_minutes, write_page
from benchmarks.places import open_places
from benchmarks.rank_processes import RankError, RankProcesses, Tp, start_ranks
from benchmarks.ranks import Request
from benchmarks.references import Way
from benchmarks.soak_figures import Sample, format_samples, format_slopes, growth_of

SHAPE: Final = KvShape(block_size=16, num_blocks=1025, num_layers=8, head_bytes=64)
MAX_BLOCKS: Final = 64
MAX_AT_ONCE: Final = 8
_SAMPLES: Final = 40
_REQUEST_S: Final = 0.01
"""For the estimate only."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``requests``: how many go through."""

    requests: int
    tp: Tp
    seed: int

    @property
    def seconds(self) -> float:
        """An estimate."""
        return 15 + self.requests * _REQUEST_S


def main(plan: Plan, *, write: bool) -> int:
    """Soak, print, write. Returns 1 when something grows."""
    print(f"takes {format_minutes(plan.seconds)}", flush=True)
    try:
        samples = _soak(plan)
    except RankError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    tables = f"{format_slopes(samples)}\n\n{format_samples(samples)}"
    print(f"\n{tables}")
    if write:
        words = (__doc__ or "").rpartition("\n\n")[2]
        write_page("soak", f"Soak: {plan.requests:,} requests", f"{words}\n{tables}")
    return 0 if all(growth_of(of_one).is_flat for of_one in samples.values()) else 1


def _soak(plan: Plan) -> dict[str, list[Sample]]:
    """Samples of each process, oldest first."""
    with open_places("loopback") as places, start_ranks(places, SHAPE, plan.tp) as ranks:
        samples: dict[str, list[Sample]] = {name: [] for name in ranks.pids}
        next_sample = num_done = 0
        for requests in _steps(plan):
            ranks.move(Way.CONNECTOR, requests)
            num_done += len(requests)
            if num_done >= next_sample:
                next_sample += plan.requests // _SAMPLES or 1
                _take_samples(ranks, num_done, samples)
    return samples


def _steps(plan: Plan) -> Iterator[list[Request]]:
    """The requests of each forward pass. What a step took is given back before the next one."""
    dice, left = random.Random(plan.seed), plan.requests
    pools = FreeBlocks(SHAPE.num_blocks), FreeBlocks(SHAPE.num_blocks)
    while left > 0:
        counts = [dice.randint(1, MAX_BLOCKS) for _ in range(min(left, dice.randint(1, MAX_AT_ONCE)))]
        requests = [
            Request(f"soak-{left - number}-{time.monotonic_ns()}", *(pool.take(count) for pool in pools))
            for number, count in enumerate(counts)
        ]
        yield requests
        for request in dice.sample(requests, len(requests)):
            pools[0].give_back(request.prefill_blocks)
            pools[1].give_back(request.decode_blocks)
        left -= len(requests)


def _take_samples(ranks: RankProcesses, num_done: int, samples: dict[str, list[Sample]]) -> None:
    ranks.trim()
    for name, pid in ranks.pids.items():
        samples[name].append(read_sample(pid, num_done))


def read_sample(pid: int, num_done: int) -> Sample:
    """What the kernel says about a process now. Source of truth: proc(5)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    num_descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Sample(num_done, int(status["VmRSS"].split()[0]), int(status["Threads"]), num_descriptors)


def _parse(argv: Sequence[str]) -> tuple[Plan, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write docs/soak.md")
    parser.add_argument("--quick", action="store_true", help="600 requests, no file")
    given = parser.parse_args(argv)
    requests = 600 if given.quick else given.requests
    return Plan(requests, Tp(2, 1), given.seed), given.write and not given.quick


if __name__ == "__main__":
    chosen, is_written = _parse(sys.argv[1:])
    sys.exit(main(chosen, write=is_written))
