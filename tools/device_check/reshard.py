"""Checks the resharder's gathering and placing on the device, beside a forward pass, against a reference in NumPy.

All prefill ranks are in this process. NCCL refuses two ranks on one GPU, so the ranks exchange by copies between their
buffers. Meanwhile a group of one rank runs collectives in the forward pass's stream.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
import torch.distributed as dist
from tools.device_check.where import Work, asked_device

from fakes.token_major import (
    Bytes,
    DecodeRank,
    Pages,
    Wanted,
    blocks_for,
    prefill_memory,
    random_cells,
    rounded_stop,
    shape_of,
)
from pdcluster_connector.device import Device, select_device
from pdcluster_connector.reshard.feeds import ReshardItem, TokenShape
from pdcluster_connector.reshard.rounds import GroupRank, Round, plan_rounds
from pdcluster_connector.reshard.tensors import Indices, Regrouping, Scratch, TokenRegion
from pdcluster_protocol.ids import RequestId

KV_HEADS: Final = 8
CELL_BYTES: Final = (256, 128)
"""Bytes of K and of V: two regions of different shape."""
PAGES: Final = Pages(16)
TOKENS: Final = (700, 33, 1200)
"""Tokens of the requests of a step."""
TPS: Final = ((4, 1), (2, 1), (2, 4))
STAGING_BYTES: Final = 256 << 10
"""Small enough that a layer takes several rounds."""
_BACKEND: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_WAIT_S: Final = 20.0


class Exchange:
    """The messages between ranks of one process. ``wait`` copies them, on the current stream."""

    def __init__(self) -> None:
        self._ends: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = []

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  # PyTorch's name
        received: list[int],
        sent: list[int],
        opts: object,  # noqa: ARG002  # PyTorch's signature
    ) -> Exchange:
        self._ends.append((torch.split(output, received), torch.split(input, sent)))
        return self

    alltoall_base = all_to_all_single
    """Name of this method before PyTorch 2.13."""

    def wait(self) -> None:
        """Copy the messages of all ranks at once, when the first of them waits."""
        for rank, (received, _) in enumerate(self._ends):
            for piece, (_, sent) in zip(received, self._ends, strict=True):
                piece.copy_(sent[rank])
        self._ends.clear()


@dataclass(frozen=True, slots=True)
class Layer:
    """K and V of some requests in all prefill ranks."""

    tp: tuple[int, int]
    wanted: tuple[tuple[Wanted, ...], ...]
    """Wanted content of each region."""
    num_blocks: int

    @property
    def shapes(self) -> list[TokenShape]:
        return [shape_of(PAGES, self.tp[0], KV_HEADS, cell) for cell in CELL_BYTES]

    @property
    def items(self) -> list[ReshardItem]:
        return [want.item for want in self.wanted[0]]


def main() -> int:
    where = asked_device()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(_BACKEND[where.type], init_method=f"file://{folder}/store", rank=0, world_size=1)
        wrong = list(filter(None, (reshard(where, new_layer(tp)) for tp in TPS)))
        dist.destroy_process_group()
    for said in wrong:
        print(said)
    names = ", ".join(f"{prefill}→{decode}" for prefill, decode in TPS)
    print(
        f"TP {names}: every byte of every decode rank right" if not wrong else f"{len(wrong)} of {len(TPS)} pairs wrong"
    )
    return 1 if wrong else 0


def new_layer(tp: tuple[int, int]) -> Layer:
    random = np.random.default_rng(3)
    each = -(-max(TOKENS) // PAGES.block_tokens) + 1
    tables = [blocks_for(random, len(TOKENS), each) for _ in range(2)]
    items = [
        ReshardItem(
            RequestId(f"r{n}"), tp[1], 0, tokens, tables[0][n], tables[1][n], PAGES.block_tokens, PAGES.page_tokens
        )
        for n, tokens in enumerate(TOKENS)
    ]
    wanted = tuple(
        tuple(
            Wanted(item, random_cells(10 * region + n, rounded_stop(item, PAGES), KV_HEADS, cell), PAGES)
            for n, item in enumerate(items)
        )
        for region, cell in enumerate(CELL_BYTES)
    )
    return Layer(tp, wanted, len(TOKENS) * each + 4)


def reshard(where: torch.device, layer: Layer) -> str:
    """The wrong bytes on decode; empty: there are none."""
    device, work = select_device(where.type), Work(where)
    regions = [_regions(where, layer, rank) for rank in range(layer.tp[0])]
    finals = [[_final(where, layer, rank, index) for index in range(len(CELL_BYTES))] for rank in range(layer.tp[0])]
    work.give(10)
    for ours, final in zip(regions, finals, strict=True):
        for region, content in zip(ours, final, strict=True):
            region.data.copy_(content)
    event = device.record()
    busy = torch.ones(1 << 20, device=where)
    for _ in range(20):
        dist.all_reduce(busy)
    _await(device, event)
    with device.open_stream(where):
        buffers = _exchange(layer, regions, where)
    return _compare(layer, buffers)


def _regions(where: torch.device, layer: Layer, rank: int) -> list[TokenRegion]:
    """Regions of one rank, stale: the forward pass has not written them yet."""
    finals = (_final(where, layer, rank, index) for index in range(len(CELL_BYTES)))
    return [
        TokenRegion(torch.full_like(final, 0xEE), shape, 0) for final, shape in zip(finals, layer.shapes, strict=True)
    ]


def _final(where: torch.device, layer: Layer, rank: int, index: int) -> torch.Tensor:
    shape = layer.shapes[index]
    return torch.from_numpy(prefill_memory(rank, layer.tp[0], shape, layer.wanted[index], layer.num_blocks)).to(where)


def _await(device: Device, event: object) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not device.is_done(event):  # type: ignore[arg-type]  # a device's own event
        if time.monotonic() > deadline:
            raise TimeoutError(f"the forward pass did not end within {_WAIT_S:g} s")


def _exchange(layer: Layer, regions: list[list[TokenRegion]], where: torch.device) -> list[list[tuple[Round, Bytes]]]:
    """Rounds of each prefill rank, with the bytes that the rank staged in them."""
    size = layer.tp[0]
    plans = [plan_rounds(GroupRank(rank, size), layer.shapes, layer.items, STAGING_BYTES) for rank in range(size)]
    indices, scratches = [Indices(where) for _ in plans], [Scratch(where) for _ in plans]
    group = cast("dist.ProcessGroup", exchange := Exchange())
    staged: list[list[tuple[Round, Bytes]]] = [[] for _ in plans]
    for turns in zip(*plans, strict=True):
        moves = [Regrouping(turn, regions[r], indices[r], scratches[r]) for r, turn in enumerate(turns)]
        for move in moves:
            move.start(group)
        exchange.wait()
        for rank, (move, turn) in enumerate(zip(moves, turns, strict=True)):
            move.finish()
            buffer = torch.empty(turn.staged_bytes, dtype=torch.uint8, device=where)
            move.place(buffer)
            staged[rank].append((turn, buffer.cpu().numpy()))
    return staged


def _compare(layer: Layer, staged: list[list[tuple[Round, Bytes]]]) -> str:
    for index in range(len(CELL_BYTES)):
        wanted = layer.wanted[index]
        for rank in range(layer.tp[1]):
            decode = DecodeRank.empty(wanted[0], layer.shapes[index], rank, layer.num_blocks)
            for turn, buffer in (one for rounds in staged for one in rounds):
                start = sum(share.staged_bytes for share in turn.regions[:index])
                for part in turn.regions[index].parts:
                    if part.decode_rank == rank:
                        decode.write(part, layer.items[part.item], buffer[start:])
            data, writes = decode.expected(wanted, KV_HEADS)
            wrong = int((decode.data[writes > 0] != data[writes > 0]).sum()) + int((decode.writes != writes).sum())
            if wrong:
                return (
                    f"TP {layer.tp[0]}→{layer.tp[1]}: {wrong:,} bytes of region {index} on decode rank {rank} are wrong"
                )
    return ""


if __name__ == "__main__":
    sys.exit(main())
