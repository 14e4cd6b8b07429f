"""Measures the connector's cost in a forward pass on the device: of each hook, and of a step with and without hooks."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from itertools import count
from typing import Final

import torch
from benchmarks.block_tables import Placement, block_tables
from benchmarks.kv_shape import KvShape
from benchmarks.ranks import Request
from tools.device_check.pair import Pair, Source, open_pair
from tools.device_check.where import Work, asked_device, synchronize

SHAPE: Final = KvShape(block_size=16, num_blocks=160, num_layers=32)
BLOCKS: Final = 128
"""Blocks of a request: 2,048 tokens."""
STEPS: Final = 5


def main() -> int:
    where = asked_device()
    names = (f"step {number}" for number in count())
    with open_pair(where, SHAPE, (1, 1)) as pair:
        work, hooks = Work(where), list[float]()
        took: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(-1, STEPS):
            bare_s, ours_s = _bare(pair, work), _hooked(pair, work, names, hooks)
            if number < 0:
                hooks.clear()
            else:
                took["without"].append(bare_s)
                took["with"].append(ours_s)
    ratio = statistics.median(ours / bare for ours, bare in zip(took["with"], took["without"], strict=True))
    print(f"{SHAPE.num_layers} layers, {BLOCKS} blocks; step of {1e3 * statistics.median(took['without']):.1f} ms")
    p99 = statistics.quantiles(hooks, n=100)[98]
    print(
        f"hook {statistics.median(hooks):.1f} us, 99th percentile {p99:.1f}; a step with it by one without: {ratio:.4f}"
    )
    return 0


def _bare(pair: Pair, work: Work) -> float:
    """Seconds of a step without a connector."""
    (source,) = pair.sources
    blocks = torch.arange(1, BLOCKS + 1, device=pair.where)
    synchronize(pair.where)
    began = time.perf_counter()
    with pair.forward:
        for layer in range(SHAPE.num_layers):
            work.give(1)
            source.compute(layer, blocks)
    synchronize(pair.where)
    return time.perf_counter() - began


def _hooked(pair: Pair, work: Work, names: Iterator[str], hooks: list[float]) -> float:
    """Seconds of the same step with one request that is pushed. Appends each hook's microseconds to ``hooks``."""
    ours, theirs = (block_tables(Placement.USED, (BLOCKS,), SHAPE.num_blocks, seed)[0] for seed in (1, 2))
    request = Request(next(names), ours, theirs)
    blocks, ended = pair.prepare(request), [0.0]

    def compute(source: Source, layer: int) -> None:
        if layer:
            hooks.append(1e6 * (time.perf_counter() - ended[0]))
        work.give(1)
        source.compute(layer, blocks)
        ended[0] = time.perf_counter()

    synchronize(pair.where)
    began = time.perf_counter()
    pair.push(request, compute)
    synchronize(pair.where)
    step_s = time.perf_counter() - began
    if wrong := pair.wrong(request):
        raise AssertionError(wrong)
    return step_s


if __name__ == "__main__":
    sys.exit(main())
