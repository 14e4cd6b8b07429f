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

from integration.ranks import Cache, Shape, engine_facts, fingerprint_of
from pdcluster_connector.assembly import make_prefill_rank
from pdcluster_connector.engine_facts import EngineRole
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import PrefillStep, PushSlice
from pdcluster_protocol.ids import EngineId, RequestId


@dataclass(slots=True)
class FarPrefill:
    """Steers the process. ``released``: requests whose source blocks it holds no more."""

    process: BaseProcess
    pipe: Connection

    def forward(self, *slices: PushSlice) -> None:
        """One forward pass that completes ``slices``; does not wait for its writes."""
        self.pipe.send(("forward", slices))

    def finished(self, names: Sequence[str]) -> set[str]:
        """vLLM has ended ``names``; whose blocks may be freed."""
        self.pipe.send(("finished", tuple(names)))
        free: set[str] = self.pipe.recv()
        return free

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def far_prefill(shape: Shape, settings: Settings, *, name: str = "far", fill: int = 200) -> Iterator[FarPrefill]:
    """A prefill engine called ``name`` whose every KV byte is ``fill``. Killed at the end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, shape, settings, name, fill), daemon=True)
    process.start()
    try:
        assert here.poll(60)
        assert here.recv() == "ready"
        yield FarPrefill(process, here)
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.join(10)


def _serve(pipe: Connection, shape: Shape, settings: Settings, name: str, fill: int) -> None:
    cache = Cache(shape)
    cache.layers[:] = fill
    facts = replace(engine_facts(EngineRole.PREFILL, shape, settings), engine_id=EngineId(name))
    rank = make_prefill_rank(facts, cache.memory(fingerprint_of(shape)))
    pipe.send("ready")
    while True:
        kind, said = pipe.recv()
        if kind == "finished":
            pipe.send(set(rank.worker.finished(map(RequestId, said))))
            continue
        rank.worker.begin_step(PrefillStep(said))
        for layer in shape.layer_names():
            rank.worker.layer_saved(layer)
        rank.worker.end_step()
