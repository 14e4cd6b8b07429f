"""Sends many requests of mixed sizes through real ranks: does the use of memory, threads or descriptors grow?

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.block_tables import FreeBlocks
from benchmarks.figures import format_minutes, format_table, slope, write_page
from benchmarks.kv_shape import KvShape
from benchmarks.places import open_places
from benchmarks.rank_processes import RankError, RankProcesses, Tp, start_ranks
from benchmarks.ranks import Request
from benchmarks.references import Way

SHAPE: Final = KvShape(block_size=16, num_blocks=1025, num_layers=8, head_bytes=64)
MAX_BLOCKS: Final = 64
MAX_AT_ONCE: Final = 8
_SAMPLES: Final = 40
_REQUEST_S: Final = 0.01
"""For the estimate only."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``requests``: how many requests the soak makes."""

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
    """The requests of each forward pass. Blocks of a step are given back before the next step."""
    dice, left = random.Random(plan.seed), plan.requests
    pools = FreeBlocks(SHAPE.num_blocks), FreeBlocks(SHAPE.num_blocks)
    while left > 0:
        counts = [dice.randint(1, MAX_BLOCKS) for _ in range(min(left, dice.randint(1, MAX_AT_ONCE)))]
        requests = [
            Request(f"soak-{left - number}-{time.monotonic_ns()}", pools[0].take(count), pools[1].take(count))
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
    """A sample of a process, taken now. Source of truth: proc(5)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    num_descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Sample(num_done, int(status["VmRSS"].split()[0]), int(status["Threads"]), num_descriptors)


SAMPLE_COLUMNS: Final = ("process", "requests", "memory MiB", "threads", "descriptors")
SLOPE_COLUMNS: Final = ("process", "memory KiB / 1,000 requests", "threads", "descriptors", "flat")
_SHOWN: Final = 8
_NOISE_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """One process after ``num_done`` requests. ``memory_kib``: resident."""

    num_done: int
    memory_kib: int
    num_threads: int
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one process over the last three quarters of a soak."""

    memory_kib_per_1000: float
    more_threads: int
    more_descriptors: int
    is_flat: bool


def growth_of(samples: Sequence[Sample]) -> Growth:
    """The first quarter is left out: pools and caches fill then. At least one sample.

    Example: 100 MiB at every sample, 12 threads and 40 descriptors throughout → flat.
    """
    settled = samples[len(samples) // 4 :]
    first, last = settled[0], settled[-1]
    per_request = slope([(sample.num_done, sample.memory_kib) for sample in settled])
    more_threads, more_descriptors = (
        last.num_threads - first.num_threads,
        last.num_descriptors - first.num_descriptors,
    )
    is_steady = per_request * (last.num_done - first.num_done) < max(_NOISE_KIB, _noise_kib(settled))
    return Growth(
        per_request * 1000, more_threads, more_descriptors, is_steady and max(more_threads, more_descriptors) <= 0
    )


def format_slopes(samples: Mapping[str, Sequence[Sample]]) -> str:
    """A Markdown table with a line for each process."""
    return format_table(SLOPE_COLUMNS, [_slope_cells(name, growth_of(of_one)) for name, of_one in samples.items()])


def format_samples(samples: Mapping[str, Sequence[Sample]]) -> str:
    """A Markdown table of some samples of each process, first and last among them."""
    lines = []
    for name, of_one in samples.items():
        step = max(1, (len(of_one) - 1) // (_SHOWN - 1))
        shown = dict.fromkeys([*of_one[::step], of_one[-1]])
        lines += [_sample_cells(name, sample) for sample in shown]
    return format_table(SAMPLE_COLUMNS, lines)


def _noise_kib(samples: Sequence[Sample]) -> float:
    """The spread of the samples around their slope, in the calmer half. A leap in one half is no noise."""
    half = len(samples) // 2
    return min(_spread_kib(samples[:half]), _spread_kib(samples[half:]))


def _spread_kib(samples: Sequence[Sample]) -> float:
    per_request = slope([(sample.num_done, sample.memory_kib) for sample in samples])
    off = [sample.memory_kib - per_request * sample.num_done for sample in samples]
    return max(off) - min(off) if off else 0.0


def _slope_cells(name: str, growth: Growth) -> tuple[str, ...]:
    return (
        name,
        f"{growth.memory_kib_per_1000:+,.1f}",
        f"{growth.more_threads:+d}",
        f"{growth.more_descriptors:+d}",
        "yes" if growth.is_flat else "NO",
    )


def _sample_cells(name: str, sample: Sample) -> tuple[str, ...]:
    memory = f"{sample.memory_kib / 1024:,.1f}"
    return name, f"{sample.num_done:,}", memory, str(sample.num_threads), str(sample.num_descriptors)


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
