"""Every byte of every layer, pushed while its kernels run: prefill to decode in another process, any of three TP pairs.

Each layer is slow work and then the kernel that writes its KV, as a forward pass gives them; the hook comes when the
host has given them, long before they end. ``--without-events`` tells the lanes that each layer is done at once: then
wrong bytes must come, or this check could not see a push that leaves too early.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
from benchmarks.block_tables import Placement, block_tables
from benchmarks.kv_shape import KvShape
from benchmarks.ranks import Request
from tools.device_check.pair import Pair, PushFailed, Source, open_pair
from tools.device_check.where import Work, asked_device, leave_out, synchronize

from pdcluster_connector.device import AcceleratorDevice, DeviceEvent, TorchRuntime, select_device

SHAPE: Final = KvShape(block_size=16, num_blocks=48, num_layers=8)
TPS: Final = ((1, 1), (2, 1), (1, 2))
BLOCKS: Final = 16
REQUESTS: Final = 3
BUSY_MS: Final = {"cpu": 1, "cuda": 10, "npu": 10}
"""Of a layer's work before its KV is written."""


class WithoutEvents(AcceleratorDevice):
    """Says that all is done, from the moment on at which ``lies`` is set."""

    lies = False

    def record(self) -> DeviceEvent:
        return None if self.lies else super().record()


def main() -> int:
    where = asked_device("--without-events")
    return control(where) if "--without-events" in sys.argv else check(where)


def check(where: torch.device) -> int:
    """The exit status."""
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


def control(where: torch.device) -> int:
    """As ``check``, of one pair, without events."""
    if where.type == "cpu":
        leave_out("a CPU's kernel has ended when its call returns: events are nothing there")
    aligned = select_device(where.type).registration_alignment_bytes
    device = WithoutEvents(TorchRuntime(), aligned)
    with open_pair(where, SHAPE, TPS[0], device) as pair:
        device.lies = True  # not before: the self-test at a rank's start would refuse it
        wrong = push_one(pair, 0)
    print(f"without events wrong bytes came: {wrong}" if wrong else "no wrong byte came without events: nothing shown")
    return 0 if wrong else 1


def push_one(pair: Pair, number: int, *, left_out: int | None = None) -> str:
    """What is wrong on decode of one more request. ``left_out``: a layer whose KV no kernel writes, for tests."""
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
    try:
        return pair.wrong(request)
    except PushFailed as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
