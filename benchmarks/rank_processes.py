"""One process for each prefill and each decode rank, as in production, steered through pipes.

    parent --- pipe ---> prefill rank 0..P-1     our rank, a bare Mooncake engine and a socket for each link
           --- pipe ---> decode rank 0..D-1      our rank, a bare Mooncake engine and a listening socket

All ways to move a request's bytes use the same processes, the same memory and the same links, and take turns, so that
their figures can be compared. Before each transfer prefill's blocks get new bytes and decode's are wiped; after it
decode compares every byte (``kv_content.py``). Neither is timed. A message that does not come within ``_REPLY_S`` ends
the run.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks.kv_content import KvWords
from benchmarks.kv_shape import KvShape, TpRank, links_between
from benchmarks.places import Place, Places
from benchmarks.ranks import Cache, DecodeEnd, PrefillEnd, Request, open_decode, open_prefill
from benchmarks.references import References, ReferenceTarget, Way, open_target

from pdcluster_protocol.params import SideChannelAddress

_REPLY_S: Final = 180.0
_LOOK_S: Final = 0.0005
"""Interval at which decode's forward thread asks what has come: half of vLLM's own step while it waits for KV."""
_DRIVER_PREFIX: Final = {Way.CONNECTOR: "pdcluster-lane"}


class RankError(Exception):
    """A rank did not answer, or a transfer failed, or it moved wrong bytes."""


@dataclass(frozen=True, slots=True)
class Tp:
    """TP sizes of both engines."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}→{self.decode}"


@dataclass(frozen=True, slots=True)
class DecodePort:
    """The addresses of one decode rank, for our connector and for the references."""

    address: SideChannelAddress
    target: ReferenceTarget


@dataclass(frozen=True, slots=True)
class Sent:
    """One rank's share of a transfer. Monotonic seconds; ``cost``: this rank's processor time; see ``Moved``."""

    begun: float
    ended: float
    cost: Cost
    num_batches: int


@dataclass(frozen=True, slots=True)
class Moved:
    """One transfer over all ranks. ``cost`` and ``num_batches``: of all prefill ranks together."""

    seconds: float
    num_bytes: int
    cost: Cost
    num_batches: int = 0
    """Batches that our lanes took from their queues, over all layers; 0 for a reference."""


@dataclass(slots=True)
class RankProcesses:
    """All ranks of two engines, ready. One thread steers them."""

    shape: KvShape
    tp: Tp
    senders: list[Connection] = field(default_factory=list)
    receivers: list[Connection] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids by role and rank, such as "decode 0"."""

    def move(self, way: Way, requests: Sequence[Request]) -> Moved:
        """Moves all KV of ``requests`` into decode's memory, and compares every byte if ``way`` writes blocks.

        Raises:
            RankError: A rank failed or did not answer, or bytes are wrong.
        """
        self._refill(requests)
        moved = self._move(way, requests)
        if way.writes_blocks:
            self._check(way, requests)
        return moved

    def trim(self) -> None:
        """Every rank's process has given its allocator's free memory back to the kernel."""
        _ask([*self.senders, *self.receivers], ("trim",))

    def _refill(self, requests: Sequence[Request]) -> None:
        """Prefill's blocks have new bytes, and decode's have zeros."""
        _tell(self.receivers, ("wipe", tuple(requests)))
        _ask(self.senders, ("fill", tuple(requests)))
        _hear(self.receivers)

    def _check(self, way: Way, requests: Sequence[Request]) -> None:
        wrong: list[str] = [it for it in _ask(self.receivers, ("check", tuple(requests))) if it]
        if wrong:
            raise RankError(f"{way.value} has moved wrong bytes: {'; '.join(wrong)}")

    def _move(self, way: Way, requests: Sequence[Request]) -> Moved:
        is_ours = way is Way.CONNECTOR
        if is_ours:
            _ask(self.receivers, ("expect", tuple(requests)))
            _tell(self.receivers, ("await", tuple(request.name for request in requests)))
        sent: list[Sent] = _ask(self.senders, ("send", way, tuple(requests)))
        ends: list[float] = _hear(self.receivers) if is_ours else [part.ended for part in sent]
        num_bytes = sum(self.shape.request_bytes(len(request.prefill_blocks)) for request in requests)
        cost = sum((part.cost for part in sent), Cost(0, 0))
        num_batches = sum(part.num_batches for part in sent)
        return Moved(max(ends) - min(part.begun for part in sent), num_bytes, cost, num_batches)


@contextmanager
def start_ranks(places: Places, shape: KvShape, tp: Tp, trace_file: str = "") -> Iterator[RankProcesses]:
    """All ranks run. They are killed at the end.

    Raises:
        RankError: One of them did not start.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else each rank prints a page as Mooncake starts
    resource_tracker.ensure_running()  # else the first child would start the tracker in its own namespace
    with ExitStack() as stack:
        ranks = RankProcesses(shape, tp)
        for rank in range(tp.decode):
            pipe, pid = _start(stack, places.decode, _serve_decode, (shape, TpRank(rank, tp.decode)))
            ranks.receivers.append(pipe)
            ranks.pids[f"decode {rank}"] = pid
        ports = tuple(_hear(ranks.receivers))
        for rank in range(tp.prefill):
            own = (shape, TpRank(rank, tp.prefill), tp.decode, ports, trace_file)
            pipe, pid = _start(stack, places.prefill, _serve_prefill, own)
            ranks.senders.append(pipe)
            ranks.pids[f"prefill {rank}"] = pid
        _hear(ranks.senders)
        yield ranks


def _start(stack: ExitStack, place: Place, serve: Callable[..., None], own: tuple[Any, ...]) -> tuple[Connection, int]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, place.host, *own), daemon=True)
    with place.starting():  # a child lives in the place in which it is started
        process.start()
    stack.callback(process.join, 10)
    stack.callback(process.kill)
    assert process.pid is not None
    return here, process.pid


def _tell(pipes: Sequence[Connection], command: tuple[Any, ...]) -> None:
    for pipe in pipes:
        pipe.send(command)


def _hear(pipes: Sequence[Connection]) -> list[Any]:
    return [_answer_of(pipe) for pipe in pipes]


def _ask(pipes: Sequence[Connection], command: tuple[Any, ...]) -> list[Any]:
    _tell(pipes, command)
    return _hear(pipes)


def _answer_of(pipe: Connection) -> Any:
    try:
        if not pipe.poll(_REPLY_S):
            raise RankError(f"a rank did not answer within {_REPLY_S:g} s")
        answer = pipe.recv()
    except EOFError as error:
        raise RankError("a rank has ended: its last words are above") from error
    if isinstance(answer, RankError):
        raise answer
    return answer


def _serve_decode(pipe: Connection, host: str, shape: KvShape, tp: TpRank) -> None:
    cache = Cache(shape, tp.size)
    end, words = open_decode(cache, tp.rank, host), KvWords(shape, tp, cache.memory)
    pipe.send(DecodePort(end.address, open_target(cache, host)))
    while True:
        pipe.send(_obey_decode(end, words, tp, pipe.recv()))


def _obey_decode(
    end: DecodeEnd, words: KvWords, tp: TpRank, command: tuple[Any, ...]
) -> float | str | RankError | None:
    """Carries out ``command``, and returns its answer; None if there is nothing to say."""
    match command:
        case ("await", names):
            return _await_all(end, names)
        case ("check", requests):
            wrong = (words.describe_wrong(it.name, it.decode_blocks) for it in requests)
            return next((f"decode rank {tp.rank}: {said}" for said in wrong if said), "")
        case ("expect", requests):
            end.expect(requests)
        case ("wipe", requests):
            words.wipe([block for request in requests for block in request.decode_blocks])
        case _:
            _trim()
    return None


def _await_all(end: DecodeEnd, names: Sequence[str]) -> float | RankError:
    """Waits for all requests. Returns when the last one came, in monotonic seconds."""
    waiting = set(names)
    while waiting:
        ended = end.take_ended()
        if failed := [name for name, is_received in ended.items() if not is_received]:
            return RankError(f"requests were not received: {failed}")
        waiting -= ended.keys()
        if waiting:
            time.sleep(_LOOK_S)
    return time.monotonic()


def _serve_prefill(
    pipe: Connection,
    host: str,
    shape: KvShape,
    tp: TpRank,
    decode_size: int,
    ports: tuple[DecodePort, ...],
    trace_file: str,
) -> None:
    cache = Cache(shape, tp.size)
    end, words = open_prefill(cache, tp.rank, host, trace_file), KvWords(shape, tp, cache.memory)
    links = {d.rank: (p, d) for p, d in links_between(tp.size, decode_size, shape) if p == tp}
    references = References(cache, host, {pair: ports[rank].target for rank, pair in links.items()})
    addresses = tuple(port.address for port in ports)
    pipe.send(None)
    while True:
        sent = None
        match pipe.recv():
            case ("send", way, requests):
                sent = _send(end, references, addresses, way, requests)
            case ("fill", requests):
                _fill(words, requests)
            case _:
                _trim()
        pipe.send(sent)


def _send(
    end: PrefillEnd,
    references: References,
    addresses: tuple[SideChannelAddress, ...],
    way: Way,
    requests: Sequence[Request],
) -> Sent:
    """One transfer by ``way``. Only this function's time is measured."""
    prefix = _DRIVER_PREFIX.get(way, References.DRIVER_PREFIX)
    num_batches, before, begun = end.num_batches, cost_so_far(prefix), time.monotonic()
    if way is Way.CONNECTOR:
        _push(end, requests, addresses)
    else:
        references.send(way, requests)
    ended = time.monotonic()
    return Sent(begun, ended, cost_so_far(prefix) - before, end.num_batches - num_batches)


def _fill(words: KvWords, requests: Sequence[Request]) -> None:
    for request in requests:
        words.fill(request.name, request.prefill_blocks)


def _trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _push(end: PrefillEnd, requests: Sequence[Request], addresses: tuple[SideChannelAddress, ...]) -> None:
    """Runs one forward pass, then steps until every block may be freed."""
    end.forward(requests, addresses)
    names = tuple(request.name for request in requests)
    free = end.release(names)
    while len(free) < len(names):
        time.sleep(_LOOK_S)
        free |= end.release(())


def thread_seconds(name_prefix: str) -> float:
    """Processor seconds so far of this process's Python threads whose names begin with ``name_prefix`` (proc(5))."""
    tids = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(name_prefix)]
    return sum(_task_seconds(Path(f"/proc/self/task/{tid}")) for tid in tids if tid is not None)


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds: of the threads that drive the writes, and of the whole process with the transport's own."""

    drivers: float
    process: float

    def __sub__(self, before: Cost) -> Cost:
        return Cost(self.drivers - before.drivers, self.process - before.process)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.drivers + other.drivers, self.process + other.process)


def cost_so_far(driver_prefix: str) -> Cost:
    """The cost of this process so far. Driver threads that have ended no longer count in ``drivers``."""
    return Cost(thread_seconds(driver_prefix), time.process_time())


def _task_seconds(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
