"""Connects prefill ranks in this process with decode ranks in another one, over the memory of one device.

this process                                   child
KV of each prefill rank   --- Mooncake, TCP --->   KV of each decode rank, which compares every byte
layers that a caller computes
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from benchmarks.kv_content import KvWords
from benchmarks.kv_shape import KvShape, TpRank
from benchmarks.ranks import Cache, DecodeEnd, PrefillEnd, Request, open_decode, open_prefill
from tools.device_check.where import synchronize

from pdcluster_connector.device import Device, Stream, select_device
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
    """One prefill rank. ``final``: the KV that the model will compute, on the device, as ``cache.layers``."""

    end: PrefillEnd
    cache: DeviceCache
    final: torch.Tensor

    def compute(self, layer: int, blocks: torch.Tensor) -> None:
        """Submit the kernel that writes ``blocks`` of one layer. Does not wait for the kernel."""
        self.cache.layers[layer].index_copy_(0, blocks, self.final[layer].index_select(0, blocks))


@dataclass(frozen=True, slots=True)
class Pair:
    """The ranks of both engines. One thread uses it."""

    where: torch.device
    forward: Stream
    """The stream of the forward pass. Not the default one, for which a plain copy would wait by itself."""
    sources: tuple[Source, ...]
    addresses: tuple[SideChannelAddress, ...]
    decode: Connection

    def prepare(self, request: Request) -> torch.Tensor:
        """Set the KV to compute, make prefill's memory stale, let decode wait. Returns prefill's blocks: int64."""
        for source in self.sources:
            host = torch.zeros(source.cache.num_bytes, dtype=torch.uint8)
            source.cache.words(host).fill(request.name, request.prefill_blocks)
            source.final.copy_(host.view_as(source.final))
            source.cache.bytes.fill_(STALE)
        blocks = torch.tensor(request.prefill_blocks, device=self.where)
        synchronize(self.where)
        self._ask("expect", request)
        return blocks

    def push(self, request: Request, compute: Callable[[Source, int], object]) -> None:
        """Run one forward pass of every prefill rank. Returns before its kernels have ended."""
        with self.forward:
            for source in self.sources:
                source.end.forward([request], self.addresses, partial(compute, source))

    def wrong(self, request: Request) -> str:
        """Wait until decode has the whole request and prefill's blocks are free. Returns its wrong bytes; empty: none.

        Raises:
            PushFailed: The request did not arrive, or prefill's blocks did not become free.
        """
        said: str = self._ask("check", request)
        deadline = time.monotonic() + _ANSWER_S
        for source in self.sources:
            free = source.end.release([request.name])
            while not free:
                if time.monotonic() > deadline:
                    raise PushFailed(f"blocks of {request.name} are not free after {_ANSWER_S:g} s")
                time.sleep(0.001)
                free = source.end.release(())
        return said

    def arrived_s(self, request: Request) -> float:
        """Wait until decode has the whole request. Returns that moment (monotonic seconds)."""
        moment: float = self._ask("await", request)
        return moment

    def _ask(self, word: str, request: Request) -> Any:
        self.decode.send((word, request))
        return _heard(self.decode)


@contextmanager
def open_pair(where: torch.device, shape: KvShape, tp: tuple[int, int], device: Device | None = None) -> Iterator[Pair]:
    """Ranks of both engines, until the block ends. ``tp``: of prefill and decode. ``device``: for prefill ranks.

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
        addresses = _heard(here)
        device = device or select_device(where.type)
        sources = []
        for rank in range(num_prefill):
            cache = DeviceCache(shape, TpRank(rank, num_prefill), where)
            end = open_prefill(cache, rank, HOST, device=device)
            stack.callback(end.close)
            sources.append(Source(end, cache, torch.empty_like(cache.layers)))
        yield Pair(where, device.open_stream(where), tuple(sources), addresses, here)


def _heard(pipe: Connection) -> Any:
    try:
        if not pipe.poll(2 * _ANSWER_S):
            raise PushFailed(f"decode did not answer within {2 * _ANSWER_S:g} s")
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
        self._arrived: set[str] = set()

    def answer(self, word: str, request: Request) -> float | str:
        """The answer to one question of the parent.

        Raises:
            PushFailed: The request did not arrive.
        """
        if word == "expect":
            return self._expect(request)
        self._await(request)
        return self._wrong(request) if word == "check" else time.monotonic()

    def _expect(self, request: Request) -> str:
        for cache in self._caches:
            cache.bytes.fill_(STALE)
        synchronize(self._where)
        for end in self.ends:
            end.expect([request])
        return ""

    def _wrong(self, request: Request) -> str:
        found = (one.words(one.bytes.cpu()).describe_wrong(request.name, request.decode_blocks) for one in self._caches)
        return next(filter(None, found), "")

    def _await(self, request: Request) -> None:
        """Wait until every rank has its part of the request."""
        waiting, deadline = list(self.ends), time.monotonic() + _ANSWER_S
        while waiting and request.name not in self._arrived:
            if time.monotonic() > deadline:
                raise PushFailed(f"{request.name} did not arrive within {_ANSWER_S:g} s")
            waiting = [end for end in waiting if not _has(end, request)]
            time.sleep(0.0002)
        self._arrived.add(request.name)


def _has(end: DecodeEnd, request: Request) -> bool:
    """Whether this rank has received the request.

    Raises:
        PushFailed: The rank has given the request up.
    """
    is_received = end.take_ended().get(request.name)
    if is_received is False:
        reasons = {lost.reason for lost in end.rank.worker.losses()}
        raise PushFailed(f"{request.name} was given up {' '.join(map(str, reasons))}".strip())
    return bool(is_received)
