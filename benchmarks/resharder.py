"""Measures the resharder: writes per layer with and without it, and its time against a copy of the same bytes.

Four prefill ranks on one machine, gloo on loopback: the ratios show the work, not the speed of a real link between
devices. ``memcpy``: each rank copies as many bytes as it stages, all at once. ``all-to-all``: the same splits alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from pdcluster_connector.reshard.feeds import ReshardItem, TokenPages, TokenShape
from pdcluster_connector.reshard.rounds import GroupRank, Round, plan_rounds, write_rows
from pdcluster_protocol.ids import RequestId

PREFILL_TP, KV_HEADS, CELL_BYTES, BLOCK_TOKENS, PROMPT_TOKENS = 4, 8, 128, 128, 2048
REGIONS = 2
"""K and V."""
END_S = 300.0


@dataclass(frozen=True)
class Case:
    decode_tp: int
    num_requests: int

    def items(self) -> list[ReshardItem]:
        """Requests with random block tables on both sides: the worst case for joining."""
        random, each = np.random.default_rng(1), PROMPT_TOKENS // BLOCK_TOKENS
        tables = [random.permutation(np.arange(1, self.num_requests * each + 1)).tolist() for _ in range(2)]
        return [
            self._item(f"r{n}", *(table[n * each : (n + 1) * each] for table in tables))
            for n in range(self.num_requests)
        ]

    def _item(self, name: str, ours: list[int], theirs: list[int]) -> ReshardItem:
        block = BLOCK_TOKENS
        return ReshardItem(RequestId(name), self.decode_tp, 0, PROMPT_TOKENS, ours, theirs, block, block)


@dataclass(frozen=True)
class Cost:
    """Costs of one rank and one layer. Times are seconds: medians, but ``plan_s``, which is taken once."""

    plan_s: float
    exchange_s: float
    memcpy_s: float
    all_to_all_s: float
    num_writes: int
    num_direct_writes: int
    staged_bytes: int


def pages(num_heads: int) -> TokenPages:
    token = num_heads * CELL_BYTES
    return TokenPages(BLOCK_TOKENS, 1, token, BLOCK_TOKENS * token, BLOCK_TOKENS * token)


def measure(rank: int, cases: Sequence[Case], repeats: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from pdcluster_connector.reshard.tensors import open_reshard_group

    torch.set_num_threads(1)
    file_store = torch._C._distributed_c10d.FileStore(store, PREFILL_TP)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=PREFILL_TP)
    group = open_reshard_group(range(PREFILL_TP), END_S)
    pipe.send([_measure(rank, case, repeats, group) for case in cases])


def _measure(rank: int, case: Case, repeats: int, group: object) -> Cost:
    import torch
    import torch.distributed as dist

    from pdcluster_connector.reshard.tensors import Indices, Regrouping, Scratch, TokenRegion

    shape, items = TokenShape(KV_HEADS, CELL_BYTES, pages(KV_HEADS // PREFILL_TP)), case.items()
    begin = time.perf_counter()
    (turn,) = plan_rounds(GroupRank(rank, PREFILL_TP), [shape] * REGIONS, items, 1 << 40)
    plan_s = time.perf_counter() - begin
    num_blocks = 1 + case.num_requests * PROMPT_TOKENS // BLOCK_TOKENS
    regions = [
        TokenRegion(torch.ones(num_blocks * shape.pages.block_stride, dtype=torch.uint8), shape, 0)
        for _ in range(REGIONS)
    ]
    buffer = torch.zeros(turn.staged_bytes, dtype=torch.uint8)
    other, indices, scratch = torch.ones_like(buffer), Indices(buffer.device), Scratch(buffer.device)

    def exchange() -> None:
        regrouping = Regrouping(turn, regions, indices, scratch)
        regrouping.start(group)  # type: ignore[arg-type]  # torch is imported in the ranks only
        regrouping.finish()
        regrouping.place(buffer)

    sends, receives = ([REGIONS * count for count in counts] for counts in _splits(turn))
    outgoing, incoming = torch.ones(sum(sends), dtype=torch.uint8), torch.ones(sum(receives), dtype=torch.uint8)

    def all_to_all() -> None:
        dist.all_to_all_single(incoming, outgoing, receives, sends, group=group)

    return Cost(
        plan_s,
        _median(exchange, repeats, group),
        _median(lambda: buffer.copy_(other), repeats, group),
        _median(all_to_all, repeats, group),
        _writes(turn, items, case),
        _direct_writes(turn),
        turn.staged_bytes,
    )


def _median(work: Callable[[], object], repeats: int, group: object) -> float:
    import torch.distributed as dist

    seconds = []
    for _ in range(repeats + 1):
        dist.barrier(group=group)  # type: ignore[arg-type]  # torch is imported in the ranks only
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _splits(turn: Round) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return turn.regions[0].sends, turn.regions[0].receives


def _writes(turn: Round, items: Sequence[ReshardItem], case: Case) -> int:
    decode = pages(KV_HEADS // case.decode_tp)
    parts = [part for exchange in turn.regions for part in exchange.parts]
    return sum(len(write_rows(part, items[part.item], decode).source) for part in parts)


def _direct_writes(turn: Round) -> int:
    """Writes without the resharder: one for each token and decode rank, over all tokens of this rank's heads."""
    tokens = [gather.pieces for exchange in turn.regions for gather in exchange.gathers]
    tokens += [copy.pieces for exchange in turn.regions for copy in exchange.copies]
    return sum(len(pieces.tokens) * pieces.piece_tokens for pieces in tokens)


def run(cases: Sequence[Case], repeats: int) -> list[list[Cost]]:
    """Measures all cases. Returns the costs by rank, then by case."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(PREFILL_TP)]
        ranks = [
            context.Process(target=measure, args=(rank, cases, repeats, f"{folder}/store", theirs))
            for rank, (_, theirs) in enumerate(ends)
        ]
        for rank in ranks:
            rank.start()
        try:
            return [ours.recv() for ours, _ in ends if ours.poll(END_S)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    cases = [Case(decode_tp, number) for decode_tp in (1, 2) for number in options.requests]
    costs = run(cases, options.repeats)
    print(f"prefill TP {PREFILL_TP}, {KV_HEADS} KV heads x {CELL_BYTES} B, K and V, {PROMPT_TOKENS} tokens a request")
    print("decode TP | requests | MiB staged a rank | writes a rank and layer | x memcpy | x all-to-all | plan, ms")
    for case, of_ranks in zip(cases, zip(*costs, strict=True), strict=True):
        slowest = max(of_ranks, key=lambda cost: cost.exchange_s)
        against = slowest.exchange_s / max(cost.memcpy_s for cost in of_ranks)
        bare = slowest.exchange_s / max(cost.all_to_all_s for cost in of_ranks)
        saved = slowest.num_direct_writes // slowest.num_writes
        print(
            f"{case.decode_tp:9} | {case.num_requests:8} | {slowest.staged_bytes / (1 << 20):17.1f} "
            f"| {slowest.num_direct_writes:24,} -> {slowest.num_writes:6,} ({saved}x)"
            f" | {against:8.1f} | {bare:12.2f} | {1000 * slowest.plan_s:8.2f}"
        )


if __name__ == "__main__":
    main()
