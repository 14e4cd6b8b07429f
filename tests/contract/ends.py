"""The two ends that the transport contract is tested with: a sender here, receivers that can be paused and killed.

Mooncake's receivers are processes whose memory is shared with the test, so that a test reads what has landed without
asking the process, also when it is stopped or dead. The fake's receivers live in this process.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from fakes.network import FakeNetwork
from patience import PATIENCE_S
from pdcluster_connector.transport.base import Transport, TransportSettings, WriteId, WriteStatus
from pdcluster_connector.transport.mooncake import MooncakeTransport
from pdcluster_connector.transport.shared import SharedSessions, Use

MEMORY_BYTES: Final = 32 << 20
HOST: Final = "127.0.0.1"
WRITES_PER_SUBMIT: Final = 128
"""Of transports of a kind with ``batches`` in its name; the others have one."""
_RECEIVER: Final = Path(__file__).with_name("receiver_process.py")


class Memory:
    """``num_bytes`` of this process at ``address``; with ``fd`` shared with whoever maps the same file."""

    def __init__(self, num_bytes: int = MEMORY_BYTES, fd: int = -1) -> None:
        self.num_bytes = num_bytes
        self.bytes = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


class Receiver(Protocol):
    """A peer whose registered memory is ``[address, address + MEMORY_BYTES)`` in its own process."""

    @property
    def session(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def memory(self) -> Memory: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def kill(self) -> None: ...


class FakeReceiver:
    """A peer in this process; ``resume`` resumes every peer of its network."""

    def __init__(self, network: FakeNetwork) -> None:
        self.memory = Memory()
        self.address = self.memory.address
        self._network = network
        self._transport = network.join()
        self._transport.register(self.address, MEMORY_BYTES)

    @property
    def session(self) -> str:
        return self._transport.session

    def pause(self) -> None:
        self._network.hold(self.session)

    def resume(self) -> None:
        self._network.release()

    def kill(self) -> None:
        self._network.cut(self.session)


class ProcessReceiver:
    """A Mooncake peer in another process."""

    def __init__(self, stack: ExitStack) -> None:
        fd = os.memfd_create("receiver")
        stack.callback(os.close, fd)
        os.ftruncate(fd, MEMORY_BYTES)
        self.memory = Memory(fd=fd)
        command = [sys.executable, str(_RECEIVER), HOST, str(fd), str(MEMORY_BYTES)]
        self._process = stack.enter_context(
            subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self._process.kill)
        self.session, address = self._answer().split()
        self.address = int(address)

    def pause(self) -> None:
        """Every thread of it stands still when this returns: one on another core would answer for a moment more."""
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        while not self._stands_still():
            assert time.monotonic() < deadline, "SIGSTOP was not obeyed"
            time.sleep(0.001)

    def _stands_still(self) -> bool:
        tasks = Path(f"/proc/{self._process.pid}/task")
        try:
            states = [path.read_text().rpartition(") ")[2][0] for path in tasks.glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):
            return False  # A thread has ended between the two looks.
        return all(state == "T" for state in states)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass(frozen=True, slots=True)
class Ends:
    """A sender with registered ``source`` memory, and a way to make peers."""

    sender: Transport
    source: Memory
    new_receiver: Callable[[], Receiver]


@contextmanager
def open_ends(kind: str) -> Iterator[Ends]:
    """Both ends of transport ``kind``; everything is gone afterwards.

    Shared: the sender is one of several users. Batches: it takes many writes in one call.
    """
    with ExitStack() as stack:
        number = WRITES_PER_SUBMIT if "batches" in kind else 1
        make, new_receiver = _fake(number) if "fake" in kind else _mooncake(stack, number)
        sender = SharedSessions(make, Use.WRITES).open() if "shared" in kind else make()
        stack.callback(sender.close)
        assert sender.writes_per_submit == number, "Mooncake cannot be asked about batches any more"
        source = Memory()
        source.bytes[:] = _some_bytes()
        sender.register(source.address, MEMORY_BYTES)
        yield Ends(sender, source, new_receiver)


@functools.cache
def _some_bytes() -> bytes:
    """The same for all tests of a process: to make them takes longer than most tests."""
    return os.urandom(MEMORY_BYTES)


def is_untouched(memory: bytes) -> bool:
    """All zeros."""
    return memory.count(0) == len(memory)


def _fake(writes_per_submit: int) -> tuple[Callable[[], Transport], Callable[[], Receiver]]:
    network = FakeNetwork(writes_per_submit)
    return network.join, lambda: FakeReceiver(network)


def _mooncake(stack: ExitStack, writes_per_submit: int) -> tuple[Callable[[], Transport], Callable[[], Receiver]]:
    settings = TransportSettings(HOST, "tcp", writes_per_submit=writes_per_submit)
    return lambda: MooncakeTransport(settings), lambda: ProcessReceiver(stack)


def outcome(transport: Transport, write: WriteId, *, timeout_s: float = PATIENCE_S) -> WriteStatus:
    """How the write ended; PENDING if it did not in time."""
    deadline = time.monotonic() + timeout_s
    while (status := transport.write_status(write)) is WriteStatus.PENDING and time.monotonic() < deadline:
        time.sleep(0.0005)
    return status
