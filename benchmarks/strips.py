"""Measures whether strips of unequal TP leave faster when they are gathered first. Prints ratios; no page.

    .venv/bin/python -m benchmarks.strips                 loopback, about two minutes
    .venv/bin/python -m benchmarks.strips --link 2gbit    a slow link; needs root

If prefill's TP is larger, ``2→1`` stands for any group of ranks that share one decode rank: 4→2 and 8→4 consist of such
groups. If prefill's TP is smaller, a rank gathers alone. Three ways move one layer of a request, in turn in each round,
and decode compares every byte:

    strips          a write for each block and pair of ranks, a call for each write
    many a call     the same writes, 128 in a call
    gathered        the ranks exchange strips (gloo), or a rank sorts its own, into registered memory in the order of
                    decode's blocks; each run of neighbouring blocks is one write
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.block_tables import Placement, block_tables
from benchmarks.places import LINKS, Place, open_places

from pdcluster_connector.settings import MAX_WRITES_IN_FLIGHT
from pdcluster_connector.transport.base import TransportSettings, WriteId, WriteRange, WriteStatus
from pdcluster_connector.transport.mooncake import MooncakeTransport
from pdcluster_protocol.launch import TransferProtocol

_SPARE: Final = 2
_MANY: Final = 128
_POLL_S: Final = 0.0003
_REPLY_S: Final = 60.0
_WAYS: Final = ("strips", "many a call", "gathered")


@dataclass(frozen=True, slots=True)
class Case:
    """One layer of one request. ``senders``, ``receivers``: numbers of ranks, of which one is 1.

    ``strip_bytes``: bytes of a block that one pair of ranks shares.
    """

    senders: int
    receivers: int
    strip_bytes: int
    num_blocks: int
    placement: Placement

    @property
    def parts(self) -> int:
        """Strips in a block of the end that has fewer ranks."""
        return max(self.senders, self.receivers)

    @property
    def pool(self) -> int:
        return _SPARE * self.num_blocks + 1

    def tables(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Prefill's and decode's block ids."""
        ours, theirs = (block_tables(self.placement, (self.num_blocks,), self.pool, seed)[0] for seed in (5, 6))
        return np.array(ours), np.array(theirs)


@dataclass(slots=True)
class Sender:
    """One prefill rank. ``kv``: [pool, this rank's strips of a block, strip bytes], uint8, on the CPU, registered."""

    case: Case
    rank: int
    transports: dict[int, MooncakeTransport]
    kv: torch.Tensor
    staging: torch.Tensor
    targets: Sequence[tuple[str, int]]

    def fill(self, turn: int) -> None:
        """Each strip of the request holds a number of its own, repeated."""
        ours, _ = self.case.tables()
        words = self.kv.view(torch.int32)
        for part in range(words.shape[1]):
            first = part if self.case.senders == 1 else self.rank
            numbers = _numbers(self.case, turn, first)
            words[torch.from_numpy(ours), part] = torch.from_numpy(numbers)[:, None]

    def send(self, way: str) -> tuple[float, float, int]:
        """Sends the layer by ``way``. Returns begin and end (monotonic seconds), and the number of writes."""
        begun = time.monotonic()
        plan = self._gathered if way == "gathered" else self._strips
        count = self._write(1 if way == "strips" else _MANY, plan())
        return begun, time.monotonic(), count

    def _strips(self) -> list[tuple[int, list[WriteRange]]]:
        ours, theirs = self.case.tables()
        size, parts = self.case.strip_bytes, self.case.parts
        if self.case.senders > 1:
            return [(0, self._rows(ours * size, (theirs * parts + self.rank) * size, size, 0))]
        return [(to, self._rows((ours * parts + to) * size, theirs * size, size, to)) for to in range(parts)]

    def _rows(
        self, sources: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], size: int, to: int
    ) -> list[WriteRange]:
        base, target = self.kv.data_ptr(), self.targets[to][1]
        return [(base + s, target + t, size) for s, t in zip(sources.tolist(), targets.tolist(), strict=True)]

    def _gathered(self) -> list[tuple[int, list[WriteRange]]]:
        ours, theirs = self.case.tables()
        order = np.argsort(theirs)
        ours, theirs = ours[order], theirs[order]
        if self.case.senders > 1:
            return [(0, self._exchanged(ours, theirs))]
        return [(to, self._sorted(ours, theirs, to)) for to in range(self.case.parts)]

    def _exchanged(self, ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> list[WriteRange]:
        """Exchanges strips, so that this rank has all strips of its part of the blocks. Returns its writes."""
        parts, size = self.case.parts, self.case.strip_bytes
        each = len(ours) // parts
        outgoing = self.kv[torch.from_numpy(ours), 0]
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        mine = self.staging[: each * parts * size].view(each, parts, size)
        mine.copy_(incoming.view(parts, each, size).transpose(0, 1))
        return self._runs(theirs[self.rank * each : (self.rank + 1) * each], parts * size, mine.data_ptr(), 0)

    def _sorted(self, ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], to: int) -> list[WriteRange]:
        size, count = self.case.strip_bytes, len(ours)
        mine = self.staging[to * count * size : (to + 1) * count * size].view(count, size)
        torch.index_select(self.kv[:, to], 0, torch.from_numpy(ours), out=mine)
        return self._runs(theirs, size, mine.data_ptr(), to)

    def _runs(self, theirs: np.ndarray[Any, Any], size: int, source: int, to: int) -> list[WriteRange]:
        starts = np.flatnonzero(np.diff(theirs, prepend=theirs[0] - 2) != 1)
        ends = np.append(starts[1:], len(theirs))
        target = self.targets[to][1]
        return [
            (source + int(a) * size, target + int(theirs[a]) * size, int(b - a) * size)
            for a, b in zip(starts, ends, strict=True)
        ]

    def _write(self, most: int, plan: list[tuple[int, list[WriteRange]]]) -> int:
        transport, in_flight = self.transports[most], list[WriteId]()
        for to, rows in plan:
            for at in range(0, len(rows), most):
                if len(in_flight) >= MAX_WRITES_IN_FLIGHT // most:
                    _await(transport, in_flight.pop(0))
                in_flight.append(transport.submit_writes(self.targets[to][0], rows[at : at + most]))
        for write in in_flight:
            _await(transport, write)
        return sum(len(rows) for _, rows in plan)


def _await(transport: MooncakeTransport, write: WriteId) -> None:
    while (status := transport.write_status(write)) is WriteStatus.PENDING:
        time.sleep(_POLL_S)
    assert status is WriteStatus.DONE, status


def _numbers(case: Case, turn: int, part: int) -> np.ndarray[Any, Any]:
    """The numbers that strip ``part`` of each block holds, by the block's position."""
    return (np.arange(case.num_blocks) * case.parts + part + 1 + 7919 * turn).astype(np.int32)


def _serve_sender(pipe: Connection, host: str, case: Case, rank: int, store: str, targets: Any) -> None:
    torch.set_num_threads(1)
    if case.senders > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        files = torch._C._distributed_c10d.FileStore(store, case.senders)
        limit = timedelta(seconds=_REPLY_S)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=case.senders, timeout=limit)
    strips = case.parts if case.senders == 1 else 1
    kv = torch.zeros(case.pool, strips, case.strip_bytes, dtype=torch.uint8)
    staging = torch.zeros(case.num_blocks * strips * case.strip_bytes, dtype=torch.uint8)
    transports = {most: _transport(host, most, kv, staging) for most in (1, _MANY)}
    sender = Sender(case, rank, transports, kv, staging, targets)
    pipe.send(None)
    while True:
        match pipe.recv():
            case ("fill", turn):
                sender.fill(turn)
                pipe.send(None)
            case ("send", way):
                pipe.send(sender.send(way))


def _transport(host: str, most: int, *memory: torch.Tensor) -> MooncakeTransport:
    transport = MooncakeTransport(TransportSettings(host, TransferProtocol.TCP.value, writes_per_submit=most))
    for tensor in memory:
        transport.register(tensor.data_ptr(), tensor.nbytes)
    return transport


def _serve_receiver(pipe: Connection, host: str, case: Case, rank: int) -> None:
    strips = case.parts if case.receivers == 1 else 1
    kv = torch.zeros(case.pool, strips, case.strip_bytes, dtype=torch.uint8)
    transport = _transport(host, 1, kv)
    pipe.send((transport.session, kv.data_ptr()))
    theirs = torch.from_numpy(case.tables()[1])
    while True:
        turn, words = pipe.recv(), kv.view(torch.int32)
        for part in range(strips):
            number = torch.from_numpy(_numbers(case, turn, part if case.receivers == 1 else rank))
            assert torch.equal(words[theirs, part], number[:, None].expand(-1, words.shape[2])), "wrong bytes"
        kv.zero_()
        pipe.send(None)


def _start(stack: ExitStack, place: Place, serve: Callable[..., None], *own: Any) -> Connection:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, place.host, *own), daemon=True)
    with place.starting():
        process.start()
    stack.callback(process.join, 5)
    stack.callback(process.kill)
    return here


def _hear(pipes: Sequence[Connection]) -> list[Any]:
    assert all(pipe.poll(_REPLY_S) for pipe in pipes), "a rank does not answer"
    return [pipe.recv() for pipe in pipes]


def _ask(pipes: Sequence[Connection], message: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(message)
    return _hear(pipes)


def _measure(case: Case, link: str, rounds: int) -> None:
    with ExitStack() as stack:
        places = stack.enter_context(open_places(link))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdcluster-strips-"))
        receivers = [_start(stack, places.decode, _serve_receiver, case, rank) for rank in range(case.receivers)]
        own = (f"{folder}/store", _hear(receivers))
        senders = [_start(stack, places.prefill, _serve_sender, case, rank, *own) for rank in range(case.senders)]
        _hear(senders)
        taken: dict[str, list[float]] = {way: [] for way in _WAYS}
        writes: dict[str, int] = {}
        for turn in range(rounds + 1):
            for way in (*_WAYS[turn % 3 :], *_WAYS[: turn % 3]):
                _ask(senders, ("fill", turn))
                sent = _ask(senders, ("send", way))
                _ask(receivers, turn)
                writes[way] = sum(count for _, _, count in sent)
                taken[way].append(max(end for _, end, _ in sent) - min(begun for begun, _, _ in sent))
        _print(case, link, {way: seconds[1:] for way, seconds in taken.items()}, writes)


def _print(case: Case, link: str, taken: dict[str, list[float]], writes: dict[str, int]) -> None:
    cells = [f"{case.senders}→{case.receivers}", f"{case.strip_bytes // 1024} KiB", case.placement.value, LINKS[link]]
    cells += [f"{writes['strips']:,} → {writes['gathered']:,}", f"{1000 * statistics.median(taken['strips']):.1f} ms"]
    for way in _WAYS[1:]:
        ratios = sorted(a / b for a, b in zip(taken[way], taken["strips"], strict=True))
        cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})")
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    """Measure and print. Returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", choices=list(LINKS), default="loopback")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--strip-kib", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--pairs", nargs="+", default=["2-1", "4-1", "1-2"], metavar="P-D")
    parser.add_argument("--blocks", type=int, default=512)
    given = parser.parse_args()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    resource_tracker.ensure_running()  # else the first child would start the tracker in its own namespace
    print("| group | strip | blocks | link | writes | strips | many a call / strips | gathered / strips |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for pair in given.pairs:
        senders, receivers = map(int, pair.split("-"))
        for strip in given.strip_kib:
            for placement in (Placement.USED, Placement.SCATTERED):
                _measure(Case(senders, receivers, strip << 10, given.blocks, placement), given.link, given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
