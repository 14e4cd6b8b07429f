"""Real prefill ranks, each a process with a resharder, in a gloo group on loopback; decode ranks are memory.

A rank plays the forward thread, and one lane thread that writes what was staged. Forked from a server that has torch
loaded, so that a group of four starts in well under a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from fakes.token_major import (
    SPARE_BLOCKS,
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
from integration.forked import forking_context
from pdcluster_connector.reshard.feeds import ReshardItem, TokenShape
from pdcluster_protocol.ids import RequestId

END_S = 60.0
"""No test waits longer for a rank."""
KV_HEADS = 8
CELL_BYTES = (16, 6)
"""Of K and of V: two regions a layer, of different shape."""


BLOCK_128 = Pages(128)


@dataclass(frozen=True)
class Scenario:
    """What all ranks run. ``steps``: of each step, (decode TP size, prompt tokens) of its requests."""

    prefill_tp: int
    steps: tuple[tuple[tuple[int, int], ...], ...]
    num_layers: int = 2
    prefill: Pages = BLOCK_128
    decode: Pages = BLOCK_128
    staging_bytes: int = 8 << 20
    timeout_s: float = 30.0
    wait_s: float = 20.0
    write_s: float = 0.0
    """How long the lane takes for each part."""
    pause_s: dict[int, float] = field(default_factory=dict)
    """Rank to how long its forward pass stops before the second step, and after the first was exchanged."""
    dies: int = -1
    """Rank that dies before the second step."""
    stuck: int = -1
    """Rank whose device never ends the second step's first layer."""
    hoards: int = -1
    """Rank whose lane gives no space back before the first failure."""
    drops: int = -1
    """Rank that has given up the first request: its KV is overwritten, its lane writes nothing of it."""
    closes: int = -1
    """Rank that is closed while it waits for the others in the second step."""
    alignment_bytes: int = 1

    @property
    def num_blocks(self) -> int:
        return 2 + sum(-(-tokens // 16) + 4 for step in self.steps for _, tokens in step)

    def shape(self, kind: int) -> TokenShape:
        return shape_of(self.prefill, self.prefill_tp, KV_HEADS, CELL_BYTES[kind])

    def wanted(self, region: int) -> list[list[Wanted]]:
        """By step; the same on every rank, and in the test."""
        random = np.random.default_rng(7)
        requests = [request for step in self.steps for request in step]
        tables = [
            blocks_for(random, len(requests), self.num_blocks // len(requests) - SPARE_BLOCKS - 1) for _ in range(2)
        ]
        items = [
            self._item(number, request, tables[0][number], tables[1][number]) for number, request in enumerate(requests)
        ]
        wanted = [Wanted(item, self._cells(region, number, item), self.decode) for number, item in enumerate(items)]
        left = iter(wanted)
        return [[next(left) for _ in step] for step in self.steps]

    def _cells(self, region: int, number: int, item: ReshardItem) -> Bytes:
        return random_cells(1000 * region + number, rounded_stop(item, self.prefill), KV_HEADS, CELL_BYTES[region % 2])

    def _item(self, number: int, request: tuple[int, int], ours: list[int], theirs: list[int]) -> ReshardItem:
        piece = min(self.prefill.page_tokens, self.decode.page_tokens)
        block = self.decode.block_tokens
        return ReshardItem(RequestId(f"r{number}"), request[0], 0, request[1], ours, theirs, block, piece)


Written: TypeAlias = dict[tuple[int, int, int], tuple[Bytes, Bytes]]
"""(region, decode TP size, decode rank) to data and number of writes."""


@dataclass
class RankResult:
    """What one rank did and saw."""

    outcomes: list[tuple[str, int, int, str]]
    """(name, step, region, reason), in order."""
    decodes: Written
    failure: str
    seconds: float
    ordered_s: float
    """When the forward thread had given its last order; ``seconds``: when the lane had written the last part."""
    is_idle: bool
    """All staging memory came back."""
    has_closed: bool
    close_s: float
    num_sockets: tuple[int, int]
    """Before the resharder's group was opened, and after it was closed."""
    staging_address: int

    def steps_of(self, name: str) -> list[int]:
        return [step for kind, step, _, _ in self.outcomes if kind == name]

    def reasons(self) -> set[str]:
        return {reason for *_, reason in self.outcomes if reason}


@contextmanager
def running(scenario: Scenario, folder: Path) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """One process for each rank. Those that still run at the end are killed."""
    context = forking_context()
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(scenario.prefill_tp):
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_run_rank, args=(rank, scenario, str(folder / "store"), theirs)
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        yield ranks
    finally:
        for process, _ in ranks:
            process.kill()
            process.join(END_S)


def run(scenario: Scenario, folder: Path) -> dict[int, RankResult]:
    """What each rank that lived to tell has to tell."""
    with running(scenario, folder) as ranks:
        results = {rank: _result(pipe) for rank, (_, pipe) in enumerate(ranks)}
        for process, _ in ranks:
            process.join(END_S)
            assert process.exitcode is not None, "a rank does not end"
    return {rank: result for rank, result in results.items() if result}


def _result(pipe: Connection) -> RankResult | None:
    assert pipe.poll(END_S), "a rank says nothing"
    try:
        result = pipe.recv()
    except EOFError:
        return None
    assert isinstance(result, RankResult), result
    return result


def assert_as_reference(scenario: Scenario, results: dict[int, RankResult], without: Sequence[str] = ()) -> None:
    """Every byte of every decode rank is right and was written once, but for the requests ``without``."""
    assert_written_once(scenario, [result.decodes for result in results.values()], without)


def assert_written_once(scenario: Scenario, written: Sequence[Written], without: Sequence[str] = ()) -> None:
    """``written``: of each prefill rank. An engine of equal TP is not resharded."""
    for region in range(2 * scenario.num_layers):
        wanted = [want for step in scenario.wanted(region) for want in step if want.item.request_id not in without]
        for engine in {want.item.decode_tp_size for want in wanted} - {scenario.prefill_tp}:
            one = next(want for want in wanted if want.item.decode_tp_size == engine)
            for rank in range(engine):
                decode = DecodeRank.empty(one, scenario.shape(region % 2), rank, scenario.num_blocks)
                for decodes in written:
                    data, writes = decodes.get((region, engine, rank), (decode.data, decode.writes * 0))
                    decode.data = np.where(writes > 0, data, decode.data)
                    decode.writes = decode.writes + writes
                data, writes = decode.expected(wanted, KV_HEADS)
                mine = writes > 0
                assert (decode.writes[mine] == 1).all()
                assert (decode.data[mine] == data[mine]).all()
                assert without or (decode.writes == writes).all()


def _run_rank(rank: int, scenario: Scenario, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        pipe.send(_Rank(rank, scenario, store).run())
    except Exception as error:
        pipe.send(repr(error))
        raise


def _num_sockets() -> int:
    return sum(_is_socket(link) for link in Path("/proc/self/fd").iterdir())


def _is_socket(link: Path) -> bool:
    """Of a descriptor that another thread may close at any moment."""
    try:
        return str(link.readlink()).startswith("socket:")
    except FileNotFoundError:
        return False


class _Never:
    """A device event that is never complete."""

    def query(self) -> bool:
        return False


class _Rank:
    def __init__(self, rank: int, scenario: Scenario, store: str) -> None:
        import torch
        import torch.distributed as dist

        from pdcluster_connector.device import CpuDevice
        from pdcluster_connector.reshard.resharder import Resharder, ResharderContext, ReshardOutcome
        from pdcluster_connector.reshard.rounds import GroupRank
        from pdcluster_connector.reshard.staging import StagingMemory
        from pdcluster_connector.reshard.tensors import TokenRegion, open_reshard_group

        torch.set_num_threads(1)
        self.rank, self.scenario = rank, scenario
        ranks = range(scenario.prefill_tp)
        dist.init_process_group(
            "gloo", store=torch._C._distributed_c10d.FileStore(store, len(ranks)), rank=rank, world_size=len(ranks)
        )
        self.wanted = [scenario.wanted(region) for region in range(2 * scenario.num_layers)]
        regions = {
            index: TokenRegion(torch.from_numpy(self._memory(index)), scenario.shape(index % 2), group=0)
            for index in range(2 * scenario.num_layers)
        }
        self.staging = StagingMemory(scenario.staging_bytes, torch.device("cpu"), scenario.alignment_bytes)
        self.outcomes: SimpleQueue[ReshardOutcome] = SimpleQueue()
        self.num_sockets = _num_sockets()
        group = open_reshard_group(ranks, scenario.timeout_s)
        parts = ResharderContext(GroupRank(rank, len(ranks)), regions, self.staging, CpuDevice(), scenario.wait_s)
        self.resharder = Resharder(parts, group, self.outcomes.put)
        self.hoarded: list[Any] = []
        self.decodes: dict[tuple[int, int, int], DecodeRank] = {}
        self.told: list[tuple[str, int, int, str]] = []
        self.ordered_s = 0.0

    def run(self) -> RankResult:
        begin = time.monotonic()
        lane = threading.Thread(target=self._lane)
        lane.start()
        for step in range(len(self.scenario.steps)):
            self._forward(step)
        self.ordered_s = time.monotonic() - begin
        fence = self.resharder.fence()
        if self.rank != self.scenario.closes:
            assert fence.wait(END_S)
            lane.join(END_S)
        fence_waited_s = time.monotonic() - begin
        close_begin = time.monotonic()
        has_closed = self.resharder.close(10.0)
        close_s = time.monotonic() - close_begin
        lane.join(END_S)
        return RankResult(
            outcomes=self.told,
            decodes={key: (decode.data, decode.writes) for key, decode in self.decodes.items()},
            failure=self.resharder.failure,
            seconds=fence_waited_s,
            ordered_s=self.ordered_s,
            is_idle=self.staging.is_idle,
            has_closed=has_closed,
            close_s=close_s,
            num_sockets=(self.num_sockets, _num_sockets()),
            staging_address=self.staging.address,
        )

    def _memory(self, region: int) -> Bytes:
        shape, scenario = self.scenario.shape(region % 2), self.scenario
        wanted = [want for step in self.wanted[region] for want in step]
        if self.rank == scenario.drops:
            wanted = wanted[1:]
        return prefill_memory(self.rank, scenario.prefill_tp, shape, wanted, scenario.num_blocks)

    def _forward(self, step: int) -> None:
        scenario = self.scenario
        if step == 1:
            self._before_second_step()
        items = {0: [want.item for want in self.wanted[0][step]]}
        self.resharder.begin_step(step, items)
        for layer in range(scenario.num_layers):
            event: Any = _Never() if (self.rank, step, layer) == (scenario.stuck, 1, 0) else None
            self.resharder.layer_saved(range(2 * layer, 2 * layer + 2), event)
        self.resharder.end_step()

    def _before_second_step(self) -> None:
        if self.rank == self.scenario.dies:
            assert self.resharder.fence().wait(END_S)
            os._exit(9)
        if self.rank == self.scenario.closes or self.rank in self.scenario.pause_s:
            assert self.resharder.fence().wait(END_S)
        time.sleep(self.scenario.pause_s.get(self.rank, 0))

    def _lane(self) -> None:
        """Write every part that was staged, until the last step was read."""
        from pdcluster_connector.reshard.resharder import Resharded, ReshardFailed, StepRead

        while True:
            try:
                outcome = self.outcomes.get(timeout=END_S)
            except Empty:
                return
            match outcome:
                case Resharded():
                    self.told.append(("staged", outcome.step, outcome.region, ""))
                    self._write(outcome)
                case ReshardFailed(step, regions, reason):
                    self.told += [("failed", step, region, reason) for region in regions]
                    self._give_hoard_back()
                case StepRead(step):
                    self.told.append(("read", step, -1, ""))
                    if step == len(self.scenario.steps) - 1:
                        self._give_hoard_back()
                        return

    def _write(self, outcome: Any) -> None:
        for part in outcome.parts:
            want = self.wanted[outcome.region][outcome.step][part.item]
            if not (self.rank == self.scenario.drops and want.item.request_id == "r0"):
                time.sleep(self.scenario.write_s)
                buffer = self.staging.tensor.numpy()[outcome.offset :]
                self._decode(outcome.region, want, part.decode_rank).write(part, want.item, buffer)
            if self.rank == self.scenario.hoards and ("read", 0, -1, "") not in self.told:
                self.hoarded.append(outcome.ticket)
            else:
                self.resharder.release(outcome.ticket)

    def _decode(self, region: int, want: Wanted, decode_rank: int) -> DecodeRank:
        key = (region, want.item.decode_tp_size, decode_rank)
        if key not in self.decodes:
            shape = self.scenario.shape(region % 2)
            self.decodes[key] = DecodeRank.empty(want, shape, decode_rank, self.scenario.num_blocks)
        return self.decodes[key]

    def _give_hoard_back(self) -> None:
        while self.hoarded:
            self.resharder.release(self.hoarded.pop())
