"""How fast and at what processor cost the connector's transport writes, beside Mooncake's blocking call and a socket.

    .venv/bin/python -m benchmarks.push_bandwidth [--rounds 5]

Three ways to move the same bytes over loopback, interleaved in every round:

    poll     ``MooncakeTransport``: submit each range, look at the oldest every 0.3 ms, as a lane does
    sync     Mooncake's ``batch_transfer_sync_write``, one call for all ranges
    socket   one plain TCP stream within this process

Prints GB/s, the processor seconds of this process for each second of transfer (the receiver of ``poll`` and ``sync`` is
another process, that of ``socket`` is this one) and the ratio to the socket of the same round. Absolute figures say
little on a shared machine; the ratios are the result.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import raw_socket

from pdcluster_connector.transport.base import WriteId, WriteStatus
from pdcluster_connector.transport.mooncake import MooncakeTransport

HOST: Final = "127.0.0.1"
MEMORY_BYTES: Final = 64 << 20
MAX_IN_FLIGHT: Final = 1024
POLL_S: Final = 0.0003
_RECEIVER: Final = Path(__file__).parents[1] / "tests" / "contract" / "receiver_process.py"
_ANONYMOUS_FD: Final = "-1"
_LOOPBACK: Final = raw_socket.Path(HOST, nullcontext, nullcontext)


@dataclass(frozen=True, slots=True)
class Shape:
    """``count`` ranges of ``num_bytes`` each, side by side."""

    count: int
    num_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.count * self.num_bytes

    @property
    def offsets(self) -> range:
        return range(0, self.total_bytes, self.num_bytes)

    def __str__(self) -> str:
        return f"{self.count} x {self.num_bytes >> 10} KiB"


SHAPES: Final = (Shape(1, 16 << 20), Shape(16, 1 << 20), Shape(64, 1 << 20), Shape(1024, 64 << 10), Shape(1024, 4096))


@dataclass(frozen=True, slots=True)
class Peer:
    """The receiver: its transport session and where its memory begins."""

    session: str
    address: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer. ``cpu_seconds``: of all threads of this process."""

    seconds: float
    cpu_seconds: float


Way = Callable[[Shape], None]
Round = dict[str, Sample]


def main(rounds: int) -> None:
    """Measure and print."""
    memory = mmap.mmap(-1, MEMORY_BYTES)
    memory[:] = bytes(range(256)) * (MEMORY_BYTES // 256)
    source = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with _open_receiver() as peer:
        ways = {"poll": _poll_way(peer, source), "sync": _sync_way(peer, source), "socket": _send_by_socket}
        for way in ways.values():
            way(Shape(64, 4096))  # opens the connections
        print(f"{'ranges':>16} {'way':>7} {'GB/s median':>12} {'min':>6} {'cpu s/s':>8} {'to socket':>10} {'min':>6}")
        for shape in SHAPES:
            samples = [{name: _measure(way, shape) for name, way in ways.items()} for _ in range(rounds)]
            for name in ways:
                print(_row(shape, name, samples))


@contextmanager
def _open_receiver() -> Iterator[Peer]:
    """A Mooncake receiver in a process of its own."""
    command = [sys.executable, str(_RECEIVER), HOST, _ANONYMOUS_FD, str(MEMORY_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            session, address = process.stdout.readline().split()
            yield Peer(session, int(address))
        finally:
            process.kill()


def _poll_way(peer: Peer, source: int) -> Way:
    transport = MooncakeTransport(HOST, "tcp")
    transport.register(source, MEMORY_BYTES)

    def write(shape: Shape) -> None:
        offsets, in_flight = deque(shape.offsets), deque[WriteId]()
        while offsets or in_flight:
            while offsets and len(in_flight) < MAX_IN_FLIGHT:
                at = offsets.popleft()
                write_id = transport.submit_write(peer.session, source + at, peer.address + at, shape.num_bytes)
                in_flight.append(write_id)
            _take_ended(transport, in_flight)
            if in_flight:
                time.sleep(POLL_S)

    return write


def _take_ended(transport: MooncakeTransport, in_flight: deque[WriteId]) -> None:
    """The oldest writes that have ended are out of ``in_flight``."""
    while in_flight:
        status = transport.write_status(in_flight[0])
        if status is WriteStatus.PENDING:
            return
        assert status is WriteStatus.DONE
        in_flight.popleft()


def _sync_way(peer: Peer, source: int) -> Way:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(source, MEMORY_BYTES) == 0

    def write(shape: Shape) -> None:
        sources = [source + at for at in shape.offsets]
        targets = [peer.address + at for at in shape.offsets]
        sizes = [shape.num_bytes] * shape.count
        assert engine.batch_transfer_sync_write(peer.session, sources, targets, sizes) == 0

    return write


def _send_by_socket(shape: Shape) -> None:
    raw_socket.measure_bandwidth(_LOOPBACK, shape.total_bytes)


def _measure(way: Way, shape: Shape) -> Sample:
    begun, cpu_begun = time.perf_counter(), time.process_time()
    way(shape)
    return Sample(time.perf_counter() - begun, time.process_time() - cpu_begun)


def _row(shape: Shape, name: str, rounds: Sequence[Round]) -> str:
    rates = [shape.total_bytes / taken[name].seconds / 1e9 for taken in rounds]
    ratios = [taken["socket"].seconds / taken[name].seconds for taken in rounds]
    cpu_share = statistics.median(taken[name].cpu_seconds / taken[name].seconds for taken in rounds)
    return (
        f"{shape!s:>16} {name:>7} {statistics.median(rates):>12.2f} {min(rates):>6.2f} {cpu_share:>8.2f}"
        f" {statistics.median(ratios):>10.2f} {min(ratios):>6.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds for each shape (default 5)")
    main(parser.parse_args().rounds)
