"""Measures Mooncake's writes over TCP from and to each kind of memory, and how long kernels are held up meanwhile.

this process                      child
a buffer on the device    ---->   a buffer on the device      speed with no kernels, and beside steps of kernels in the
or pinned, or plain       ---->   or in the host's memory     default stream or in another; a step's time with and
                                                              without writes under way

Mooncake copies from and to a device piece by piece (``MC_TCP_SLICE_SIZE``), by blocking calls in CUDA's default stream.
vLLM computes in a stream of its own. Both processes share the one device here, which serves them in turn. Mooncake
reads the size of a piece only once, so each size is tried in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias

import torch
from tools.device_check.where import START_S, Work, asked_device, synchronize

from pdcluster_connector.transport.base import TransportSettings, WriteStatus
from pdcluster_connector.transport.mooncake import MooncakeTransport
from pdcluster_protocol.launch import TransferProtocol

HOST: Final = "127.0.0.1"
MIB: Final = {"cpu": 16, "cuda": 64, "npu": 64}
"""MiB of one measurement."""
RANGE_BYTES: Final = 1 << 20
STEP_MS: Final = {"cpu": 1, "cuda": 8, "npu": 8}
STEPS: Final = 12
"""Steps of a measurement without writes. With writes steps run as long as the writes."""
PLACES: Final = ("device", "pinned", "host")
LOADS: Final = ("none", "default", "other")
"""Streams in which steps of kernels run; ``none``: no kernels."""
SHORT: Final = (("device", "device"), ("device", "host"), ("host", "device"), ("host", "host"))
PIECES: Final = (64 << 10, 256 << 10, 1 << 20)
"""Bytes of a piece. The first is Mooncake's default; only for it all cases are measured."""
_WAIT_S: Final = 30.0
_TABLE_S: Final = {"cpu": 140.0, "cuda": 28.0, "npu": 28.0}


Measure: TypeAlias = Callable[[torch.device, int, Connection], None]
"""Measures for a device and a number of bytes of a piece, and sends its lines."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. ``source``, ``target``: of ``PLACES``; ``load``: of ``LOADS``."""

    source: str
    target: str
    load: str
    mib_s: float
    with_ms: float
    """Median milliseconds of a step while writes are under way; 0: no steps ran."""
    without_ms: float

    @property
    def line(self) -> str:
        steps = f"; a step {self.with_ms:.2f} ms, {self.without_ms:.2f} without" if self.load != "none" else ""
        return f"{self.source:6} -> {self.target:6} kernels: {self.load:7} {self.mib_s:6.0f} MiB/s{steps}"


def main() -> int:
    where = asked_device()
    tables = {size: in_a_process(where, size) for size in PIECES}
    print_tables(tables)
    return 0


def print_tables(tables: Mapping[int, Sequence[str]]) -> None:
    """Print the lines of each size of pieces, and the last of each together."""
    for size, lines in tables.items():
        print(f"pieces of {size >> 10} KiB\n" + "\n".join(lines))
    print("; ".join(f"{size >> 10} KiB: {lines[-1]}" for size, lines in tables.items()))


def in_a_process(where: torch.device, piece_bytes: int, measure: Measure | None = None) -> list[str]:
    """The lines of one size of pieces. ``measure``: a module's function that sends them; by default all cases.

    Raises:
        AssertionError: The process has ended without lines, or takes too long.
    """
    limit_s = _TABLE_S[where.type]
    os.environ["MC_TCP_SLICE_SIZE"] = str(piece_bytes)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=measure or _measure_all, args=(where, piece_bytes, there))
    process.start()
    there.close()
    try:
        assert here.poll(limit_s), f"pieces of {piece_bytes} bytes: not through after {limit_s:g} s"
        lines: list[str] = here.recv()
    except EOFError as error:
        raise AssertionError("the measuring process has ended: its last words are above") from error
    finally:
        process.kill()
        process.join()
    return lines


def _measure_all(where: torch.device, piece_bytes: int, pipe: Connection) -> None:
    enter(where)
    is_first = piece_bytes == PIECES[0]
    with open_bench(where) as bench:
        ways = tuple(product(PLACES, ("device", "host"))) if is_first else SHORT
        loads = LOADS if where.type != "cpu" else LOADS[:2]
        rows = [bench.measure(*way, load) for way in ways for load in (loads if is_first else (LOADS[0], loads[-1]))]
        staging = [staging_line(bench)] if where.type != "cpu" and is_first else []
    pipe.send([*(row.line for row in rows), *staging, _summary(rows)])


def enter(where: torch.device) -> None:
    """Use the device in this thread; of a CPU, one core."""
    if where.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(where)


def _summary(rows: list[Row]) -> str:
    """One line: the speeds without kernels, the speed beside kernels, and what a step of kernels then takes."""
    speed = {(row.source, row.target, row.load): row for row in rows}
    told = [f"{one} to {two} {speed[one, two, 'none'].mib_s:.0f}" for one, two in SHORT]
    busy = speed["device", "device", rows[-1].load]
    return (
        f"MiB/s {', '.join(told)}; beside kernels {busy.mib_s:.0f}, a step {busy.with_ms / busy.without_ms:.2f} times"
    )


@dataclass(frozen=True, slots=True)
class Bench:
    """Both ends of the writes, and the kernels of this process."""

    where: torch.device
    transport: MooncakeTransport
    session: str
    sources: Mapping[str, torch.Tensor]
    targets: Mapping[str, int]
    """Addresses of the child's memory, by place."""
    work: Work
    other: Any
    """A stream that is not the default one."""
    child: Connection

    def measure(self, source: str, target: str, load: str) -> Row:
        """Write all of ``source`` once, beside steps of kernels unless ``load`` is none."""
        writing = threading.Event()
        took: list[float] = []
        thread = threading.Thread(target=lambda: took.append(self.write_s(source, target, writing)))
        without = [self._step(load) for _ in range(STEPS)] if load != "none" else []
        thread.start()
        writing.wait(_WAIT_S)
        during = []
        while load != "none" and thread.is_alive():
            during.append(self._step(load))
        thread.join()
        mib = self.sources[source].numel() >> 20
        with_ms, without_ms = (1e3 * statistics.median(some or [0.0]) for some in (during, without))
        return Row(source, target, load, mib / took[0], with_ms, without_ms)

    def write_s(self, source: str, target: str, writing: threading.Event) -> float:
        """Seconds until every byte is acknowledged."""
        memory, there = self.sources[source], self.targets[target]
        begin, each = memory.data_ptr(), self.transport.writes_per_submit
        ranges = [(begin + at, there + at, RANGE_BYTES) for at in range(0, memory.numel(), RANGE_BYTES)]
        writing.set()
        began = time.monotonic()
        pending = [
            self.transport.submit_writes(self.session, ranges[at : at + each]) for at in range(0, len(ranges), each)
        ]
        while pending:
            states = [(write, self.transport.write_status(write)) for write in pending]
            if any(state not in (WriteStatus.DONE, WriteStatus.PENDING) for _, state in states):
                raise AssertionError(f"a write from {source} to {target} failed")
            pending = [write for write, state in states if state is WriteStatus.PENDING]
            if time.monotonic() - began > _WAIT_S:
                raise AssertionError(f"writes from {source} to {target} do not end")
            time.sleep(0.0002)
        return time.monotonic() - began

    def _step(self, load: str) -> float:
        return step_s(self.where, self.work, self.stream(load))

    def stream(self, load: str) -> AbstractContextManager[object]:
        """The block's kernels go to the stream of ``load``."""
        return self.other if load == "other" and self.where.type != "cpu" else nullcontext()


def step_s(where: torch.device, work: Work, stream: AbstractContextManager[object]) -> float:
    """Seconds of a step of kernels in ``stream``, by the host's clock."""
    began = time.perf_counter()
    with stream:
        work.give(STEP_MS[where.type])
        if where.type != "cpu":
            torch.accelerator.current_stream().synchronize()
    return time.perf_counter() - began


def staging_line(bench: Bench) -> str:
    """The speed of copies to pinned memory on a stream of our own, without and beside kernels in another stream."""
    device, pinned = bench.sources["device"], bench.sources["pinned"]
    ours = torch.Stream(bench.where)
    speeds = []
    for is_busy in (False, True):
        taken = []
        for _ in range(STEPS):
            synchronize(bench.where)
            if is_busy:
                with bench.stream("other"):
                    bench.work.give(4 * STEP_MS[bench.where.type])
            began = time.perf_counter()
            with ours:
                pinned.copy_(device, non_blocking=True)
            ours.synchronize()
            taken.append(time.perf_counter() - began)
        speeds.append((device.numel() >> 20) / statistics.median(taken))
    return f"a copy to pinned memory on a stream of its own: {speeds[0]:.0f} MiB/s, beside kernels {speeds[1]:.0f}"


@contextmanager
def open_bench(where: torch.device) -> Iterator[Bench]:
    """Both processes run until the block ends."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_receive, args=(there, where), daemon=True)
    child.start()
    there.close()
    transport = MooncakeTransport(TransportSettings(HOST, TransferProtocol.TCP.value))
    try:
        if not here.poll(START_S):
            raise AssertionError("the child does not start")
        session, targets = here.recv()
        sources = buffers(where)
        for memory in sources.values():
            transport.register(memory.data_ptr(), memory.numel())
        other = torch.Stream(where) if where.type != "cpu" else None
        bench = Bench(where, transport, session, sources, targets, Work(where), other, here)
        for _ in range(3):
            bench._step("none")
        bench.measure("device", "device", "none")
        yield bench
    finally:
        transport.close()
        child.kill()
        child.join()


def _receive(pipe: Connection, where: torch.device) -> None:
    """Main function of the child: memory to write to, and steps of its own from a load's name until the next word."""
    if where.type != "cpu":
        torch.accelerator.set_device_index(where)
    transport, memories = MooncakeTransport(TransportSettings(HOST, TransferProtocol.TCP.value)), buffers(where)
    for memory in memories.values():
        transport.register(memory.data_ptr(), memory.numel())
    pipe.send((transport.session, {name: memory.data_ptr() for name, memory in memories.items()}))
    work, other = Work(where), torch.Stream(where) if where.type != "cpu" else nullcontext()
    while load := pipe.recv():
        stream = other if load == "other" else nullcontext()
        pipe.send(median_step(pipe, partial(step_s, where, work, stream)))


def median_step(pipe: Connection, step: Callable[[], float]) -> float:
    """Runs steps until an empty word comes through ``pipe``. Returns the median of the seconds that they return, from
    the last other word on."""
    taken = list[float]()
    while True:
        taken.append(step())
        if pipe.poll():
            if not pipe.recv():
                return statistics.median(taken)
            taken.clear()


def buffers(where: torch.device) -> dict[str, torch.Tensor]:
    """Memory of each place, of which every page was touched."""
    num_bytes = MIB[where.type] << 20
    return {
        "device": torch.full((num_bytes,), 7, dtype=torch.uint8, device=where),
        "pinned": torch.full((num_bytes,), 8, dtype=torch.uint8, pin_memory=where.type != "cpu"),
        "host": torch.full((num_bytes,), 9, dtype=torch.uint8),
    }


if __name__ == "__main__":
    sys.exit(main())
