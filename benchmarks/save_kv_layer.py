"""Measures the connector's cost to the forward thread, per step and layer, beside a push planned in Python per block.

    python benchmarks/save_kv_layer.py

One prefill rank pushes into a decode rank in another process (real side channel, real Mooncake over TCP). The
"forward pass" is a thread that multiplies matrices between layers, so that lanes and forward thread compete as in
an engine. The reference builds one (source, target, bytes) tuple per block and layer, as the layerwise
connectors of today do. Prints microseconds: median and 99th percentile, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from integration.ranks import (  # after the path is set
    LIFE,
    SECRET,
    Cache,
    Shape,
    blocks_slice,
    engine_facts,
    expect,
    fingerprint_of,
)
from pdcluster_connector.assembly import PrefillRank, make_decode_rank, make_prefill_rank
from pdcluster_connector.ending import end_parts
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import DecodeStep, PrefillStep, PushSlice, PushTarget
from pdcluster_protocol.ids import Attempt, EngineId, RequestId, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import SideChannelAddress

SHAPE: Final = Shape(num_layers=32, num_blocks=8192, kv_heads=2)
BLOCKS_PER_REQUEST: Final = 128
"""2,048 tokens in blocks of 16."""
STEPS: Final = 12
MATRIX: Final = np.random.default_rng(1).random((256, 256), np.float32)


def serve_decode(pipe: Connection) -> None:
    """Child process: a decode rank that expects what the parent announces."""
    cache = Cache(SHAPE)
    rank = make_decode_rank(engine_facts(Role.DECODE, SHAPE, Settings()), cache.memory(fingerprint_of(SHAPE)))
    pipe.send(rank.address)
    while (names := pipe.recv()) is not None:
        expects = [expect(n, BLOCKS_PER_REQUEST, 60_000) for n in names]
        rank.worker.begin_step(DecodeStep(expects=tuple(expects)))
        pipe.send(None)
        waiting = set(names)
        while waiting:
            receipts = rank.worker.receipts()
            assert not receipts.failed, receipts.failed
            waiting -= receipts.ended
            time.sleep(0.001)
        pipe.send(None)
    end_parts([rank])


def slices_of(step: int, num_requests: int, address: SideChannelAddress) -> tuple[PushSlice, ...]:
    """The slices of a step. Each takes every second block, so that nothing coalesces: the worst case."""
    target = PushTarget(EngineId("decode"), 1, (address,), 60_000)
    blocks = tuple(range(1, 1 + 2 * BLOCKS_PER_REQUEST, 2))
    return tuple(slice_of(f"{num_requests}-{step}-{n}", target, blocks, n) for n in range(num_requests))


def slice_of(name: str, target: PushTarget, blocks: tuple[int, ...], shift: int) -> PushSlice:
    token = SECRET.mint(TransferId(name), Attempt(1), target.deadline_ms)
    theirs = tuple(block + shift for block in blocks)
    return PushSlice(
        RequestId(name), TransferId(name), Attempt(1), token, target, blocks_slice(blocks, theirs), 2048, is_last=True
    )


def timed(samples: list[float], call: Callable[[], object]) -> None:
    begin = time.perf_counter()
    call()
    samples.append((time.perf_counter() - begin) * 1e6)


def compute() -> None:
    """About half a millisecond of matrix products, without the interpreter lock."""
    for _ in range(4):
        np.dot(MATRIX, MATRIX)


def one_step(rank: PrefillRank, step: PrefillStep, begins: list[float], layers: list[float]) -> None:
    timed(begins, lambda: rank.worker.begin_step(step))
    for name in SHAPE.layer_names():
        compute()
        timed(layers, lambda name=name: rank.worker.layer_saved(name))  # type: ignore[misc]  # bound now
    rank.worker.end_step()


def python_per_block(slices: tuple[PushSlice, ...], layers: list[float]) -> None:
    """The reference: a tuple per block in the forward thread, for each layer."""
    for layer in range(SHAPE.num_layers):
        compute()
        timed(layers, lambda layer=layer: [  # type: ignore[misc]  # bound now
            (layer + a * SHAPE.block_bytes, layer + b * SHAPE.block_bytes, SHAPE.block_bytes)
            for part in slices
            for a, b in zip(part.groups[0].source_blocks, part.groups[0].target_blocks, strict=True)
        ])  # fmt: skip


def measure(rank: PrefillRank, pipe: Connection, address: SideChannelAddress, num_requests: int) -> str:
    begins: list[float] = []
    layers: list[float] = []
    reference: list[float] = []
    for step in range(STEPS):
        slices = slices_of(step, num_requests, address)
        pipe.send([part.request_id for part in slices])
        pipe.recv()
        one_step(rank, PrefillStep(LIFE, slices), begins, layers)
        pipe.recv()
        rank.worker.finished(part.request_id for part in slices)
        python_per_block(slices, reference)
    ours, theirs = statistics.median(layers), statistics.median(reference)
    p99 = statistics.quantiles(layers, n=100)[98]
    return (
        f"{num_requests:>8} | {statistics.median(begins):>9.1f} | {ours:>8.1f} {p99:>8.1f} | "
        f"{theirs:>8.1f} | {ours / theirs:>6.3f}"
    )


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.save_kv_layer", description=__doc__).parse_args()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=serve_decode, args=(there,), daemon=True)
    child.start()
    there.close()  # Only the child holds that end now: if it dies, ``recv`` raises instead of waiting for ever.
    address = here.recv()
    source = Cache(SHAPE)
    rank = make_prefill_rank(engine_facts(Role.PREFILL, SHAPE, Settings()), source.memory(fingerprint_of(SHAPE)))
    print(f"{SHAPE.num_layers} layers, {BLOCKS_PER_REQUEST} blocks per request, {STEPS} steps; microseconds")
    print("requests | per step  | per layer: median, p99 | Python per block | ratio", flush=True)
    for num_requests in (1, 8, 32):
        print(measure(rank, here, address, num_requests), flush=True)
    here.send(None)
    child.join(10)
    end_parts([rank])


if __name__ == "__main__":
    main()
