"""Other ways to move the same bytes between the same two memories, with which our push is compared.

    blocking         Mooncake's ``batch_transfer_sync_write``, one call for all ranges of a link, as peers do it
    submit and poll  one ``transfer_submit_write`` a range; the oldest one's status is read every 0.3 ms
    socket           one plain TCP stream a link

Each link has a thread of its own, as with our connector it has a lane.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final

from benchmarks.kv_shape import Range, TpRank, ranges_between
from benchmarks.ranks import Cache, Request

_MAX_IN_FLIGHT: Final = 1024
_POLL_S: Final = 0.0003
_CHUNK_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 60.0
_NUM_BYTES: Final = 8
"""Length of the header before a transfer's bytes, which holds their number."""
# Mooncake refuses more than 2,048 transfers in flight, counted over all threads.
_LIFTED_LIMIT: Final = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}

Link = tuple[TpRank, TpRank]


class Way(Enum):
    """How a request's bytes are moved."""

    CONNECTOR = "our connector"
    POLL = "Mooncake, submit and poll"
    BLOCKING = "Mooncake, blocking call"
    SOCKET = "plain socket"

    @property
    def writes_blocks(self) -> bool:
        """Whether the bytes end in the request's blocks. A plain socket's bytes end anywhere."""
        return self is not Way.SOCKET


REFERENCES: Final = tuple(way for way in Way if way is not Way.CONNECTOR)


@dataclass(frozen=True, slots=True)
class ReferenceTarget:
    """How the references reach one decode rank: its Mooncake session, its memory's address, and a plain socket."""

    session: str
    address: int
    host: str
    port: int


def open_target(cache: Cache, host: str) -> ReferenceTarget:
    """All references can write to the memory of ``cache`` as long as this process lives."""
    engine = _start_engine(cache, host)
    _KEPT.append(engine)
    listener = socket.create_server((host, 0))
    threading.Thread(target=_accept_all, args=(listener, cache), name="listener", daemon=True).start()
    return ReferenceTarget(f"{host}:{engine.get_rpc_port()}", cache.address, host, listener.getsockname()[1])


class References:
    """The references of one prefill rank. One thread uses it."""

    DRIVER_PREFIX: ClassVar[str] = "reference"

    def __init__(self, cache: Cache, host: str, targets: dict[Link, ReferenceTarget]) -> None:
        self._cache = cache
        self._engine = _start_engine(cache, host)
        self._targets = targets
        self._streams = {link: socket.create_connection((it.host, it.port), 10) for link, it in targets.items()}
        for stream in self._streams.values():
            stream.settimeout(_TIMEOUT_S)
        self._drivers = ThreadPoolExecutor(len(targets), thread_name_prefix=self.DRIVER_PREFIX)

    def send(self, way: Way, requests: Sequence[Request]) -> None:
        """Moves the requests' bytes over all links. Waits until all have arrived."""
        write = {Way.POLL: self._poll, Way.BLOCKING: self._block, Way.SOCKET: self._stream}[way]
        plans = {link: self._plan(link, requests) for link in self._targets}
        for done in [self._drivers.submit(write, link, rows) for link, rows in plans.items()]:
            done.result()

    def _plan(self, link: Link, requests: Sequence[Request]) -> list[Range]:
        shape, target, source = self._cache.shape, self._targets[link].address, self._cache.address
        rows = [row for it in requests for row in ranges_between(shape, link, it.prefill_blocks, it.decode_blocks)]
        return [Range(row.source + source, row.target + target, row.num_bytes) for row in rows]

    def _block(self, link: Link, rows: Sequence[Range]) -> None:
        sources, targets, sizes = (list(column) for column in zip(*rows, strict=True))
        status = self._engine.batch_transfer_sync_write(self._targets[link].session, sources, targets, sizes)
        assert status == 0, status

    def _poll(self, link: Link, rows: Sequence[Range]) -> None:
        session, left, in_flight = self._targets[link].session, deque(rows), deque[int]()
        while left or in_flight:
            while left and len(in_flight) < _MAX_IN_FLIGHT:
                in_flight.append(self._engine.transfer_submit_write(session, *left.popleft()))
            while in_flight and (status := self._engine.transfer_check_status(in_flight[0])):
                assert status > 0, status
                in_flight.popleft()
            if in_flight:
                time.sleep(_POLL_S)

    def _stream(self, link: Link, rows: Sequence[Range]) -> None:
        """Sends as many bytes as the ranges have, in one stream. They have nothing to do with the blocks' places."""
        stream, total = self._streams[link], sum(row.num_bytes for row in rows)
        stream.sendall(total.to_bytes(_NUM_BYTES))
        memory = memoryview(self._cache.memory)
        for start in range(0, total, _CHUNK_BYTES):
            at = start % (self._cache.num_bytes - _CHUNK_BYTES + 1)
            stream.sendall(memory[at : at + min(_CHUNK_BYTES, total - start)])
        assert stream.recv(1), "the receiver has hung up"


_KEPT: Final[list[Any]] = []
"""Keeps this process's Mooncake engines, which would close without a reference."""


def _start_engine(cache: Cache, host: str) -> Any:
    for name, value in _LIFTED_LIMIT.items():
        os.environ.setdefault(name, value)
    from mooncake.engine import TransferEngine  # reads the environment

    engine = TransferEngine()
    assert engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0, f"Mooncake cannot start on {host}"
    assert engine.register_memory(cache.address, cache.num_bytes) == 0, "Mooncake cannot register the memory"
    return engine


def _accept_all(listener: socket.socket, cache: Cache) -> None:
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=_receive_all, args=(stream, memoryview(cache.memory)), daemon=True).start()


def _receive_all(stream: socket.socket, memory: memoryview) -> None:
    """Receives one transfer after the other: its size, then its bytes. Answers each with one byte."""
    with stream:
        while header := stream.recv(_NUM_BYTES, socket.MSG_WAITALL):
            total, got = int.from_bytes(header), 0
            while got < total:
                at = got % (len(memory) - _CHUNK_BYTES + 1)
                got += stream.recv_into(memory[at : at + min(_CHUNK_BYTES, total - got)])
            stream.sendall(b".")
