"""Measures the cost of content sums to a thread: off, sampled and full, side by side in one run.

    python -m benchmarks.content_sums [--tokens 2048] [--repeats 9] [--step-ms 474]

The KV of one request as vLLM's CPU engine keeps it: 16 layers, 8 KV heads, 512 bytes a cell (64 KiB a token). Times are
CPU time of the thread, which a busy machine changes less than wall-clock time. ``--step-ms``: how long the prefill of
the prompt takes; costs are shares of it. The default was measured for 2,048 tokens of a model with this KV on two
cores. The last line is the cost of a plain sum of all words, which is little more than reading them. As in an engine,
PyTorch computes the sampled sums and Numba the full ones. Without Numba, or with ``NUMBA_DISABLE_JIT=1``, PyTorch
computes both.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Final

import torch

from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.content_loop import compiled_loop
from pdcluster_connector.worker.content_sums import KvReader
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.side_channel import RankLayout, RegionLayout

LAYERS, HEADS, PAGE, CELL = 16, 8, 16, 512
PAGE_BYTES: Final = HEADS * PAGE * CELL


def reader_of(num_tokens: int) -> KvReader:
    """A rank's KV, of random words."""
    pages = num_tokens // PAGE
    regions = tuple(
        RegionLayout(f"layers.{n}", 0, n * pages * PAGE_BYTES, pages, PAGE_BYTES, PAGE_BYTES, heads=HEADS)
        for n in range(LAYERS)
    )
    words = torch.randint(1 << 62, (LAYERS, pages, HEADS, PAGE, CELL // 8))
    return KvReader(RankLayout(0, 1, regions), tuple(words.view(torch.uint8)))


def cost_ms(reader: KvReader, order: ContentOrder, repeat: int) -> float:
    """CPU milliseconds that one side of a transfer spends on its sums."""
    begun = time.thread_time()
    if order.check is not ContentCheck.OFF:
        loop = compiled_loop() if order.check is ContentCheck.FULL else None
        replace(reader, loop=loop).received(order, f"transfer {repeat}").result()
    return (time.thread_time() - begun) * 1000


def plain_ms(reader: KvReader) -> float:
    """CPU milliseconds of adding up all words."""
    begun = time.thread_time()
    for view in reader.views:
        view.view(torch.int64).sum()
    return (time.thread_time() - begun) * 1000


def print_cost(name: str, found: list[float], step_ms: float) -> None:
    low, middle = min(found), median(found)
    print(
        f"{name:9} min {low:7.2f} ms = {100 * low / step_ms:5.2f} %   "
        f"median {middle:7.2f} ms = {100 * middle / step_ms:5.2f} %"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.content_sums")
    arguments.add_argument("--tokens", type=int, default=2048)
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--step-ms", type=float, default=474.0)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    reader = reader_of(given.tokens)
    compiled_loop()
    spans, tables = (((0, given.tokens),),), (tuple(range(given.tokens // PAGE)),)
    costs: dict[ContentCheck, list[float]] = {check: [] for check in ContentCheck}
    plain: list[float] = []
    for repeat in range(given.repeats):
        for check, found in costs.items():
            found.append(cost_ms(reader, ContentOrder(spans, tables, check), repeat))
        plain.append(plain_ms(reader))
    mib = LAYERS * given.tokens // PAGE * PAGE_BYTES >> 20
    print(f"{given.tokens} tokens, {mib} MiB, {given.repeats} times, against a prefill of {given.step_ms:g} ms")
    for check, found in costs.items():
        print_cost(check.value, found, given.step_ms)
    print_cost("plain sum", plain, given.step_ms)


if __name__ == "__main__":
    main()
