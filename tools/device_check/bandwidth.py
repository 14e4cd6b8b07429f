"""Pushes a large request from the device's memory to another process, in turn with copies of it to the host.

The speed is that of this machine's loopback: TCP reads the device's memory through the host. RDMA is not tried here.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Final

import torch
from benchmarks.block_tables import Placement, block_tables
from benchmarks.kv_shape import KvShape
from benchmarks.ranks import Request
from tools.device_check.pair import Pair, open_pair
from tools.device_check.where import asked_device, synchronize

SHAPE: Final = KvShape(block_size=16, num_blocks=160)
BLOCKS: Final = 128
ROUNDS: Final = 5


def main() -> int:
    where = asked_device()
    num_mib = SHAPE.request_bytes(BLOCKS) >> 20
    pushes, copies = list[float](), list[float]()
    host = torch.zeros(SHAPE.request_bytes(BLOCKS), dtype=torch.uint8)
    with open_pair(where, SHAPE, (1, 1)) as pair:
        for number in range(-1, ROUNDS):
            push_s, copy_s = _push(pair, number), _copy(pair, host)
            if number >= 0:
                pushes.append(push_s)
                copies.append(copy_s)
    ratio = statistics.median(push / copy for push, copy in zip(pushes, copies, strict=True))
    speed = num_mib / statistics.median(pushes)
    print(f"{num_mib} MiB at {speed:.0f} MiB/s, every byte right; as long as {ratio:.1f} copies to the host")
    return 0


def _push(pair: Pair, number: int) -> float:
    """Seconds from the beginning of the forward pass until decode has the whole request.

    Raises:
        AssertionError: Decode has wrong bytes."""
    ours, theirs = (block_tables(Placement.USED, (BLOCKS,), SHAPE.num_blocks, seed)[0] for seed in (1, 2))
    request = Request(f"round {number}", ours, theirs)
    blocks = pair.prepare(request)
    (source,) = pair.sources
    for layer in range(SHAPE.num_layers):
        source.compute(layer, blocks)
    synchronize(pair.where)
    began = time.monotonic()
    pair.push(request, lambda _source, _layer: None)
    seconds = pair.arrived_s(request) - began
    if wrong := pair.wrong(request):
        raise AssertionError(wrong)
    return seconds


def _copy(pair: Pair, host: torch.Tensor) -> float:
    """Seconds of a copy of the same number of bytes to ``host``."""
    (source,) = pair.sources
    synchronize(pair.where)
    began = time.monotonic()
    host.copy_(source.cache.bytes[: host.numel()])
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
