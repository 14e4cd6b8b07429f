"""A prefill rank in a process of its own, so that it can be stopped and killed in the middle of a write."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

import msgspec

from integration.ranks import Cache, Shape, engine_facts, fingerprint_of
from pdcluster_connector.assembly import make_prefill_rank
from pdcluster_connector.engine_facts import Memory
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import PrefillStep, PushSlice
from pdcluster_protocol.ids import BootId, EngineId, RequestId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.side_channel import RankLayout

FAR_LIFE: Final = BootId("far life")
"""Of the engine, unless a test says that it is another's."""


@dataclass(slots=True)
class FarPrefill:
    """Steers the process. ``released``: requests whose source blocks it holds no more."""

    process: BaseProcess
    pipe: Connection

    def forward(self, *slices: PushSlice, life: BootId = FAR_LIFE) -> None:
        """One forward pass that completes ``slices``; does not wait for its writes."""
        self.pipe.send(("forward", PrefillStep(life, slices)))

    def finished(self, names: Sequence[str]) -> set[str]:
        """vLLM has ended ``names``; whose blocks may be freed."""
        self.pipe.send(("finished", tuple(names)))
        free: set[str] = self.pipe.recv()
        return free

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def far_prefill(
    shape: Shape, settings: Settings, *, name: str = "far", fill: int = 200, rank: int = 0, tp_size: int = 1
) -> Iterator[FarPrefill]:
    """A prefill rank, of an engine that its process calls ``name``, whose every KV byte is ``fill``. Killed at the end.

    ``shape``: of the whole model.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, shape, settings, name, fill, rank, tp_size), daemon=True)
    process.start()
    try:
        assert here.poll(180)
        assert here.recv() == "ready"
        yield FarPrefill(process, here)
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.join(10)


def _serve(
    pipe: Connection, shape: Shape, settings: Settings, name: str, fill: int, tp_rank: int, tp_size: int
) -> None:
    cache = Cache(replace(shape, kv_heads=shape.kv_heads // tp_size))
    cache.layers[:] = fill
    facts = replace(engine_facts(Role.PREFILL, shape, settings), engine_id=EngineId(name), tp_size=tp_size)
    rank = make_prefill_rank(facts, _memory_of(cache, shape, tp_rank, tp_size))
    pipe.send("ready")
    while True:
        kind, said = pipe.recv()
        if kind == "finished":
            pipe.send(set(rank.worker.finished(map(RequestId, said))))
            continue
        rank.worker.begin_step(said)
        for layer in shape.layer_names():
            rank.worker.layer_saved(layer)
        rank.worker.end_step()


def _memory_of(cache: Cache, shape: Shape, tp_rank: int, tp_size: int) -> Memory:
    """``cache`` holds the rank's share of the model's heads."""
    memory = cache.memory(fingerprint_of(shape))
    regions = tuple(msgspec.structs.replace(region, heads=shape.kv_heads) for region in memory.layout.regions)
    return replace(memory, layout=RankLayout(tp_rank, tp_size, regions))
