"""A rank in a process of its own, so that it can be stopped and killed in the middle of a write."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import msgspec

from fakes.transports import StopsItsProcess, wrap_transports
from integration.forked import forking_context
from integration.ranks import Cache, Shape, engine_facts, expect, fingerprint_of, forward
from patience import PATIENCE_S
from pdcluster_connector.assembly import make_decode_rank, make_prefill_rank
from pdcluster_connector.engine_facts import Memory
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import Cancel, DecodeStep, Expect, PrefillStep, PushSlice
from pdcluster_protocol.ids import BootId, EngineId, RequestId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import SideChannelAddress
from pdcluster_protocol.side_channel import RankLayout

FAR_LIFE: Final = BootId("far life")
"""Of the prefill engine, unless a test says that it is another's."""


@dataclass(slots=True)
class FarRank:
    """Steers the process."""

    process: BaseProcess
    pipe: Connection
    ready: Any
    """What the rank said when it was."""

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


class FarPrefill(FarRank):
    """A prefill rank."""

    def forward(self, *slices: PushSlice, life: BootId = FAR_LIFE) -> None:
        """One forward pass that completes ``slices``; does not wait for its writes."""
        self.pipe.send(("forward", PrefillStep(life, slices)))

    def stop_in_next_push(self) -> None:
        """Its process will stop by itself when one write of it has landed and others have not: from outside, a push is
        over before a machine has let one do that."""
        self.pipe.send(("stop", None))

    def finished(self, names: Sequence[str]) -> set[str]:
        """vLLM has ended ``names``; whose blocks may be freed."""
        self.pipe.send(("finished", tuple(names)))
        free: set[str] = self.pipe.recv()
        return free


class FarDecode(FarRank):
    """A decode rank."""

    @property
    def address(self) -> SideChannelAddress:
        assert isinstance(self.ready, SideChannelAddress)
        return self.ready

    def expect(self, name: str, num_blocks: int, *, deadline_ms: int = 20_000) -> None:
        self.pipe.send(expect(name, num_blocks, deadline_ms))

    def cancel(self, name: str) -> None:
        self.pipe.send(Cancel(RequestId(name), "cancelled by the test"))

    def ended(self) -> dict[str, bool]:
        """Requests whose wait has ended so far, and whether their KV is here."""
        self.pipe.send("ended")
        ended: dict[str, bool] = self.pipe.recv()
        return ended


@contextmanager
def far_prefill(
    shape: Shape, settings: Settings, *, name: str = "far", fill: int = 200, rank: int = 0, tp_size: int = 1
) -> Iterator[FarPrefill]:
    """A prefill rank, of an engine that its process calls ``name``, whose every KV byte is ``fill``. Killed at the end.

    ``shape``: of the whole model.
    """
    with _process(_serve_prefill, shape, settings, name, fill, rank, tp_size) as parts:
        yield FarPrefill(*parts)


@contextmanager
def far_decode(shape: Shape, settings: Settings) -> Iterator[FarDecode]:
    """A decode rank with an empty cache. Killed at the end."""
    with _process(_serve_decode, shape, settings) as parts:
        yield FarDecode(*parts)


@contextmanager
def _process(serve: Callable[..., None], *args: object) -> Iterator[tuple[BaseProcess, Connection, Any]]:
    context = forking_context()
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *args), daemon=True)
    process.start()
    try:
        assert here.poll(180)
        yield process, here, here.recv()
    finally:
        process.kill()  # a stopped one too
        process.join(PATIENCE_S)


def _serve_prefill(
    pipe: Connection, shape: Shape, settings: Settings, name: str, fill: int, tp_rank: int, tp_size: int
) -> None:
    cache = Cache(replace(shape, kv_heads=shape.kv_heads // tp_size))
    cache.layers[:] = fill
    facts = replace(engine_facts(Role.PREFILL, shape, settings), engine_id=EngineId(name), tp_size=tp_size)
    rank = make_prefill_rank(facts, _memory_of(cache, shape, tp_rank, tp_size))
    pipe.send("ready")
    has_stopped = threading.Event()
    while True:
        kind, said = pipe.recv()
        if kind == "stop":
            wrap_transports(rank.worker, partial(StopsItsProcess, has_stopped=has_stopped))
        elif kind == "finished":
            pipe.send(set(rank.worker.finished(map(RequestId, said))))
        else:
            forward(rank.worker, shape, said)


def _memory_of(cache: Cache, shape: Shape, tp_rank: int, tp_size: int) -> Memory:
    """``cache`` holds the rank's share of the model's heads."""
    memory = cache.memory(fingerprint_of(shape))
    regions = tuple(msgspec.structs.replace(region, heads=shape.kv_heads) for region in memory.layout.regions)
    return replace(memory, layout=RankLayout(tp_rank, tp_size, regions))


def _serve_decode(pipe: Connection, shape: Shape, settings: Settings) -> None:
    cache = Cache(shape)
    rank = make_decode_rank(engine_facts(Role.DECODE, shape, settings), cache.memory(fingerprint_of(shape)))
    pipe.send(rank.address)
    ended: dict[str, bool] = {}
    while True:
        said = pipe.recv()
        if isinstance(said, Expect):
            rank.worker.begin_step(DecodeStep(expects=(said,)))
        elif isinstance(said, Cancel):
            rank.worker.begin_step(DecodeStep(cancels=(said,)))
        else:
            receipts = rank.worker.receipts()
            ended |= {name: name not in receipts.failed for name in receipts.ended}
            pipe.send(ended)
