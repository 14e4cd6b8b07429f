"""Measures the hand-over of a prompt of 8,000 tokens and 32 layers: layerwise, serial, and with its content compared.

A layer does as much work as a large model's layer, and then runs the kernel that writes its KV. *Exposed* is the time
from the end of the forward pass on the device until decode has every byte, and has compared the content.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

import torch
from benchmarks.block_tables import Placement, block_tables
from benchmarks.kv_shape import KvShape
from benchmarks.ranks import Request
from tools.device_check.pair import Pair, Source, open_pair
from tools.device_check.where import Work, asked_device, median_s, synchronize

from pdcluster_connector.settings import PushTiming
from pdcluster_protocol.params import ContentCheck

_LARGE: Final = KvShape(block_size=16, num_blocks=520, num_layers=32, kv_heads=4)
SHAPES: Final = {
    "cpu": KvShape(block_size=16, num_blocks=40, num_layers=32, kv_heads=4),
    "cuda": _LARGE,
    "npu": _LARGE,
}
"""64 KiB of KV a token."""
BLOCKS: Final = {"cpu": 30, "cuda": 500, "npu": 500}
PASS_S: Final = {"cpu": 0.03, "cuda": 0.2, "npu": 0.2}
"""Of work, whatever a device takes for a product: about what 8e9 weights take for 8,000 tokens on an H100."""
ROUNDS: Final = 5
CHECKS: Final = (ContentCheck.OFF, ContentCheck.SAMPLED, ContentCheck.FULL)


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one request."""

    bare: float
    """The pass without a connector, just before the pass with it."""
    forward: float
    """The pass with the connector."""
    exposed: float


def main() -> int:
    where = asked_device()
    names = (f"prompt {number}" for number in count())
    found = dict[tuple[PushTiming, ContentCheck], list[Times]]()
    for timing in PushTiming:
        with open_pair(where, SHAPES[where.type], (1, 1), timing=timing) as pair:
            work = Layer(where)
            checks = CHECKS if timing is PushTiming.LAYERWISE else CHECKS[:1]
            for check in checks:
                _pushed(pair, work, next(names), check)
            for _ in range(ROUNDS):
                for check in checks:
                    times = _pushed(pair, work, next(names), check)
                    found.setdefault((timing, check), []).append(times)
    for (timing, check), rows in found.items():
        print(_line(timing, check, rows))
    print(_summary(found))
    return 0


def _line(timing: PushTiming, check: ContentCheck, rows: list[Times]) -> str:
    bare, forward, exposed = (statistics.median(getattr(row, name) for row in rows) for name in Times.__slots__)
    spread = f"{min(row.exposed for row in rows):.0f}..{max(row.exposed for row in rows):.0f}"
    passes = f"pass {bare:.1f} ms bare, {forward:.1f} with it ({_cost(rows):.4f})"
    return f"{timing.value}, content {check.value}: {passes}, exposed {exposed:.1f} ms ({spread})"


def _cost(rows: list[Times]) -> float:
    """Median ratio of a pass with the connector to the pass without it just before."""
    return statistics.median(row.forward / row.bare for row in rows)


def _summary(found: dict[tuple[PushTiming, ContentCheck], list[Times]]) -> str:
    ours, serial = (
        statistics.median(row.exposed for row in found[timing, ContentCheck.OFF])
        for timing in (PushTiming.LAYERWISE, PushTiming.SERIAL)
    )
    cost = {check: _cost(found[PushTiming.LAYERWISE, check]) for check in CHECKS}
    more = ", ".join(f"{check.value} {100 * (cost[check] - cost[ContentCheck.OFF]):+.2f} %" for check in CHECKS[1:])
    return f"exposed hand-over {100 * ours / serial:.1f} % of serial's; of a pass, content {more}"


class Layer:
    """The work of one layer of ``PASS_S``: products, of which one took 2.7 ms on an H200."""

    def __init__(self, where: torch.device) -> None:
        self._work = Work(where)
        product_s, *_ = median_s(where, ROUNDS, partial(self._work.give, 1))
        self._products = products_of(PASS_S[where.type] / SHAPES[where.type].num_layers, product_s)

    def give(self) -> None:
        """Keep the current stream busy with it."""
        self._work.give(self._products)


def products_of(layer_s: float, product_s: float) -> int:
    """The number of products that come next to ``layer_s``, at least one. Pure."""
    return max(1, round(layer_s / product_s))


def _pushed(pair: Pair, work: Layer, name: str, check: ContentCheck) -> Times:
    """Push one more prompt. Does not compare its bytes, which would take seconds: ``layers.py`` does that."""
    shape, where = SHAPES[pair.where.type], pair.where
    counts = (BLOCKS[where.type],)
    ours, theirs = (block_tables(Placement.USED, counts, shape.num_blocks, seed)[0] for seed in (1, 2))
    request = Request(name, ours, theirs, check)
    blocks = torch.tensor(ours, device=where)
    pair.expect(request)

    def compute(source: Source, layer: int) -> None:
        work.give()
        source.compute(layer, blocks)

    bare = _timed(pair, lambda: _bare(pair, compute))
    forward = _timed(pair, lambda: pair.push(request, compute))
    ended = time.monotonic()
    exposed = 1e3 * (pair.arrived_s(request) - ended)
    pair.release(request)
    return Times(bare, forward, exposed)


def _bare(pair: Pair, compute: Callable[[Source, int], object]) -> None:
    with pair.forward:
        for layer in range(SHAPES[pair.where.type].num_layers):
            compute(pair.sources[0], layer)


def _timed(pair: Pair, step: Callable[[], object]) -> float:
    """Milliseconds until the device has done the forward pass. Does not wait for other streams."""
    synchronize(pair.where)
    began = time.perf_counter()
    step()
    if pair.where.type != "cpu":
        pair.forward.synchronize()  # type: ignore[attr-defined]
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
