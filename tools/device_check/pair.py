"""Connects prefill ranks in this process with decode ranks in another one, over the memory of one device.

this process                                   child
KV of each prefill rank   --- Mooncake, TCP --->   KV of each decode rank, which compares every byte
layers that a caller computes
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from benchmarks.kv_content import KvWords
from benchmarks.kv_shape import KvShape, TpRank
from benchmarks.ranks import Cache, PrefillEnd, Request, open_decode, open_prefill
from tools.device_check.where import START_S, synchronize

from pdcluster_connector.device import Device, Stream, select_device
from pdcluster_connector.settings import PushTiming
from pdcluster_protocol.params import SideChannelAddress

HOST: Final = "127.0.0.1"
STALE: Final = 0xEE
"""Value of every byte that no kernel has written yet."""
_ANSWER_S: Final = 30.0


class PushFailed(Exception):
    """A request did not arrive, or another process did not answer."""


class DeviceCache(Cache):
    """One rank's KV memory on a device, in the order of ``kv_shape.py``."""

    def __init__(self, shape: KvShape, tp: TpRank, where: torch.device) -> None:
        self.shape, self.tp_size, self.device_type = shape, tp.size, where.type
        self.num_bytes = shape.rank_bytes(tp.size)
        self.bytes = torch.full((self.num_bytes,), STALE, dtype=torch.uint8, device=where)
        self.address = self.bytes.data_ptr()
        pages = shape.num_blocks, len(shape.heads_of(tp)), shape.block_size, shape.head_bytes
        self.views = tuple(layer.view(pages) for layer in self.layers)
        self._tp = tp

    @property
    def layers(self) -> torch.Tensor:
        """uint8 [layer, block, byte]."""
        return self.bytes.view(self.shape.num_layers, self.shape.num_blocks, -1)

    def words(self, host: torch.Tensor) -> KvWords:
        """The cache's content as words. ``host``: as many bytes in the host's memory, borrowed."""
        return KvWords(self.shape, self._tp, host.numpy().data)


@dataclass(frozen=True, slots=True)
class Source:
    """One prefill rank. ``final``: the KV that the model will compute, on the device, shaped like ``cache.layers``."""

    end: PrefillEnd
    cache: DeviceCache
    final: torch.Tensor

    def compute(self, layer: int, blocks: torch.Tensor) -> None:
        """Submit the kernel that writes ``blocks`` of one layer. Does not wait for the kernel."""
        self.cache.layers[layer].index_copy_(0, blocks, self.final[layer].index_select(0, blocks))


@dataclass(frozen=True, slots=True)
class End:
    """How the wait for one request ended on decode."""

    is_received: bool
    said: str
    """Wrong bytes of what was received; else why the request was given up."""
    moment: float
    """Monotonic seconds. Both processes read the same clock."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The ranks of both engines. One thread uses it."""

    where: torch.device
    forward: Stream
    """The stream of the forward pass. It is not the default stream, for which a plain copy would wait by itself."""
    sources: tuple[Source, ...]
    addresses: tuple[SideChannelAddress, ...]
    decode: Connection

    def prepare(self, *requests: Request) -> torch.Tensor:
        """Set the KV to compute, make all memory stale, let decode wait. Returns prefill's blocks: int64."""
        for source in self.sources:
            host = torch.zeros(source.cache.num_bytes, dtype=torch.uint8)
            for request in requests:
                source.cache.words(host).fill(request.name, request.prefill_blocks)
            source.final.copy_(host.view_as(source.final))
            source.cache.bytes.fill_(STALE)
        blocks = torch.tensor([block for request in requests for block in request.prefill_blocks], device=self.where)
        synchronize(self.where)
        for word, request in zip(chain(["expect"], repeat("also")), requests, strict=False):
            self._ask(word, request)
        return blocks

    def expect(self, request: Request) -> None:
        """Let decode wait for a request. Unlike ``prepare`` it leaves all memory as it is."""
        self._ask("also", request)

    def push(self, request: Request, compute: Callable[[Source, int], object]) -> None:
        """Run one forward pass of every prefill rank. Returns before its kernels have ended."""
        self.push_all([request], compute)

    def push_all(self, requests: Sequence[Request], compute: Callable[[Source, int], object]) -> None:
        """As ``push``, with several requests in the one forward pass."""
        with self.forward:
            for source in self.sources:
                source.end.forward(requests, self.addresses, partial(compute, source))

    def wrong(self, request: Request) -> str:
        """Wait until decode has the whole request and prefill's blocks are free. Returns its wrong bytes; empty: none.

        Raises:
            PushFailed: The request did not arrive, or prefill's blocks did not become free.
        """
        said: str = self._ask("check", request)
        self.release(request)
        return said

    def release(self, *requests: Request) -> None:
        """Say that vLLM has ended the requests, and wait until prefill's blocks are free.

        Raises:
            PushFailed: The blocks are not free in time.
        """
        deadline = time.monotonic() + _ANSWER_S
        for source in self.sources:
            names = {request.name for request in requests}
            names -= source.end.release(sorted(names))
            while names:
                if time.monotonic() > deadline:
                    raise PushFailed(f"blocks of {', '.join(sorted(names))} are not free after {_ANSWER_S:g} s")
                time.sleep(0.001)
                names -= source.end.release(())

    def arrived_s(self, request: Request) -> float:
        """Wait until decode has the whole request. Returns that moment (monotonic seconds)."""
        moment: float = self._ask("await", request)
        return moment

    def end_of(self, request: Request) -> End:
        """Wait until decode has the request, or has given it up.

        Raises:
            PushFailed: Neither happens in time.
        """
        end: End = self._ask("end", request)
        return end

    def spoil_decode(self, request: Request) -> None:
        """Let a kernel on decode's device fail. ``request``: any; the answer comes before the kernel has run."""
        self._ask("spoil", request)

    def _ask(self, word: str, request: Request) -> Any:
        self.decode.send((word, request))
        return _heard(self.decode, 2 * _ANSWER_S)


@contextmanager
def open_pair(
    where: torch.device,
    shape: KvShape,
    tp: tuple[int, int],
    device: Device | None = None,
    *,
    timing: PushTiming = PushTiming.LAYERWISE,
) -> Iterator[Pair]:
    """Ranks of both engines run until the block ends. ``tp``: of prefill and decode. ``device``: for prefill ranks.

    Raises:
        ConfigError: A rank cannot start here.
        PushFailed: Decode does not start.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Mooncake logs a page for each rank at its start
    num_prefill, num_decode = tp
    with ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        child = context.Process(target=serve_decode, args=(there, where, shape, num_decode), daemon=True)
        child.start()
        there.close()  # only the child holds that end now, so ``recv`` fails if it dies
        stack.callback(child.join, 10)
        stack.callback(child.kill)
        addresses = _heard(here, START_S)
        device = device or select_device(where.type)
        sources = []
        for rank in range(num_prefill):
            cache = DeviceCache(shape, TpRank(rank, num_prefill), where)
            end = open_prefill(cache, rank, HOST, device=device, timing=timing)
            stack.callback(end.close)
            sources.append(Source(end, cache, torch.empty_like(cache.layers)))
        yield Pair(where, device.open_stream(where), tuple(sources), addresses, here)


def _heard(pipe: Connection, within_s: float) -> Any:
    try:
        if not pipe.poll(within_s):
            raise PushFailed(f"decode did not answer within {within_s:g} s")
        answer = pipe.recv()
    except EOFError as error:
        raise PushFailed("decode has ended: its last words are above") from error
    if isinstance(answer, Exception):
        raise answer
    return answer


def serve_decode(pipe: Connection, where: torch.device, shape: KvShape, num_ranks: int) -> None:
    """Main function of the child."""
    if where.type != "cpu":
        torch.accelerator.set_device_index(where)
    decode = _Decode(shape, num_ranks, where)
    pipe.send(tuple(end.address for end in decode.ends))
    while True:
        word, request = pipe.recv()
        try:
            pipe.send(decode.answer(word, request))
        except PushFailed as error:
            pipe.send(error)


class _Decode:
    """All decode ranks. One thread uses it."""

    def __init__(self, shape: KvShape, num_ranks: int, where: torch.device) -> None:
        self._where = where
        self._caches = [DeviceCache(shape, TpRank(rank, num_ranks), where) for rank in range(num_ranks)]
        self.ends = [open_decode(cache, rank, HOST) for rank, cache in enumerate(self._caches)]
        self._ended: list[dict[str, bool]] = [{} for _ in self.ends]
        """For each rank: requests whose wait has ended, and whether they were received."""
        self._lost: dict[str, str] = {}
        """Requests that prefill has given up, and why. They are cancelled, as by a router that has no other engine."""

    def answer(self, word: str, request: Request) -> float | str | End:
        """The answer to one question of the parent.

        Raises:
            PushFailed: The request did not arrive.
        """
        if word in ("expect", "also"):
            return self._expect(request, is_first=word == "expect")
        if word == "spoil":
            fail_kernel(self._caches[0].layers)
            return ""
        is_received, moment = self._await(request), time.monotonic()
        if word == "end":
            return End(is_received, self._wrong(request) if is_received else self._reason(request), moment)
        if not is_received:
            raise PushFailed(f"{request.name} was given up {self._reason(request)}".strip())
        return self._wrong(request) if word == "check" else moment

    def _expect(self, request: Request, *, is_first: bool) -> str:
        if is_first:
            for cache in self._caches:
                cache.bytes.fill_(STALE)
            synchronize(self._where)
        for end in self.ends:
            end.expect([request])
        return ""

    def _wrong(self, request: Request) -> str:
        try:
            copies = [one.bytes.cpu() for one in self._caches]
        except RuntimeError as error:
            return f"decode's device cannot be read: {str(error).splitlines()[0]}"
        found = (
            one.words(copy).describe_wrong(request.name, request.decode_blocks)
            for one, copy in zip(self._caches, copies, strict=True)
        )
        return next(filter(None, found), "")

    def _reason(self, request: Request) -> str:
        return self._lost.get(request.name, "")

    def _await(self, request: Request) -> bool:
        """Wait until every rank's wait has ended. Returns whether all ranks have the request."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            self._look()
            known = [ended.get(request.name) for ended in self._ended]
            if None not in known:
                return False not in known
            if time.monotonic() > deadline:
                raise PushFailed(f"{request.name} did not arrive within {_ANSWER_S:g} s")
            time.sleep(0.0002)

    def _look(self) -> None:
        lost: dict[str, str] = {}
        for end, ended in zip(self.ends, self._ended, strict=True):
            ended.update(end.take_ended())
            lost.update(end.take_lost())
        for name in lost.keys() - self._lost.keys():
            for end in self.ends:
                end.cancel(name, lost[name])
        self._lost = {**lost, **self._lost}


def fail_kernel(memory: torch.Tensor) -> None:
    """Give the device a kernel that fails like one with a wrong block number. Does nothing on a CPU.

    ``memory``: uint8 [layer, block, byte], not written.
    """
    if memory.device.type != "cpu":
        memory[0][torch.full((1,), 1 << 40, device=memory.device)]
