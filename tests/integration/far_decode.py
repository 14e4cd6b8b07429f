"""A decode rank in a process of its own, so that it can be stopped while a prefill rank writes to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from integration.ranks import Cache, Shape, engine_facts, expect, fingerprint_of
from pdcluster_connector.assembly import make_decode_rank
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import Cancel, DecodeStep, Expect
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import SideChannelAddress


@dataclass(slots=True)
class FarDecode:
    """Steers the process."""

    process: BaseProcess
    pipe: Connection
    address: SideChannelAddress

    def expect(self, name: str, num_blocks: int, *, deadline_ms: int = 20_000) -> None:
        self.pipe.send(expect(name, num_blocks, deadline_ms))

    def cancel(self, name: str) -> None:
        self.pipe.send(Cancel(RequestId(name), "cancelled by the test"))

    def ended(self) -> dict[str, bool]:
        """Requests whose wait has ended so far, and whether their KV is here."""
        self.pipe.send("ended")
        ended: dict[str, bool] = self.pipe.recv()
        return ended

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def far_decode(shape: Shape, settings: Settings) -> Iterator[FarDecode]:
    """A decode rank with an empty cache. Killed at the end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, shape, settings), daemon=True)
    process.start()
    try:
        assert here.poll(180)
        yield FarDecode(process, here, here.recv())
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.join(10)


def _serve(pipe: Connection, shape: Shape, settings: Settings) -> None:
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
