"""Pushes every layer while its kernels run, to decode in another process, and compares every byte, in three TP pairs.

Each layer is slow work and then the kernel that writes its KV, as in a forward pass. The hook is called when the host
has submitted both, long before they end. ``control.py`` shows that this check would see a push that leaves too early.
"""

from __future__ import annotations

import sys
from typing import Final

from benchmarks.block_tables import Placement, block_tables
from benchmarks.kv_shape import KvShape
from benchmarks.ranks import Request
from tools.device_check.pair import Pair, Source, open_pair
from tools.device_check.where import Work, asked_device, synchronize

SHAPE: Final = KvShape(block_size=16, num_blocks=48, num_layers=8)
TPS: Final = ((1, 1), (2, 1), (1, 2))
BLOCKS: Final = 16
REQUESTS: Final = 3
BUSY_MS: Final = {"cpu": 1, "cuda": 10, "npu": 10}
"""Milliseconds of a layer's work before its KV is written."""


def main() -> int:
    where = asked_device()
    for tp in TPS:
        with open_pair(where, SHAPE, tp) as pair:
            wrong = list(filter(None, (push_one(pair, number) for number in range(REQUESTS))))
        print(f"TP {tp[0]}→{tp[1]}: {REQUESTS - len(wrong)} of {REQUESTS} requests exact {' '.join(wrong)}")
        if wrong:
            return 1
    num_bytes = len(TPS) * REQUESTS * SHAPE.request_bytes(BLOCKS)
    busy_ms = BUSY_MS[where.type]
    print(f"{num_bytes >> 20} MiB compared, every byte right; a layer's KV is written after {busy_ms} ms of work")
    return 0


def push_one(pair: Pair, number: int, *, left_out: int | None = None) -> str:
    """Push one more request. Returns its wrong bytes on decode; empty: none. ``left_out``: layer not written (tests).

    Raises:
        PushFailed: The request did not arrive.
    """
    ours, theirs = (block_tables(Placement.USED, (BLOCKS,), SHAPE.num_blocks, seed)[0] for seed in (number, number + 9))
    request, work = Request(f"request {number}", ours, theirs), Work(pair.where)
    blocks = pair.prepare(request)
    work.give(1)
    synchronize(pair.where)

    def compute(source: Source, layer: int) -> None:
        work.give(BUSY_MS[pair.where.type])
        if layer != left_out:
            source.compute(layer, blocks)

    pair.push(request, compute)
    return pair.wrong(request)


if __name__ == "__main__":
    sys.exit(main())
