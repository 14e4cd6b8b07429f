"""The ranks of one engine are one life of it, whatever each of their processes made of its own configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from integration.far_ranks import FarPrefill, far_prefill
from integration.harness import eventually
from integration.ranks import (
    Cache,
    Shape,
    another_prefill,
    engine_facts,
    expect,
    fingerprint_of,
    make_pair,
    push_slice,
)
from patience import PATIENCE_S, until
from pdcluster_connector.assembly import DecodeRank, make_decode_rank
from pdcluster_connector.ending import end_parts
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import DecodeStep, PushSlice
from pdcluster_protocol.labels import Role

SHAPE = Shape(kv_heads=2)
QUICK = Settings(quarantine_s=0.5, hold_s=0.5, lease_s=30.0, handshake_timeout_s=60.0)


class Bench:
    """A decode rank of TP 1, and the two ranks of a prefill engine of TP 2, as on two nodes."""

    def __init__(self, stack: ExitStack) -> None:
        self.cache = Cache(SHAPE)
        facts = engine_facts(Role.DECODE, SHAPE, QUICK)
        self.decode: DecodeRank = make_decode_rank(facts, self.cache.memory(fingerprint_of(SHAPE)))
        stack.callback(end_parts, [self.decode])
        # vLLM mints instance_id for each VllmConfig, and vllm-ascend the engine id for each process.
        ranks = (far_prefill(SHAPE, QUICK, name=f"node-{r}", fill=100 + r, rank=r, tp_size=2) for r in (0, 1))
        self.ranks: list[FarPrefill] = [stack.enter_context(rank) for rank in ranks]
        self.ended: dict[str, bool] = {}
        self.lost: list[str] = []

    def expect(self, name: str) -> None:
        self.decode.worker.begin_step(DecodeStep(expects=(expect(name, 1, 120_000),)))

    def part(self, name: str) -> PushSlice:
        """Block 1 of each rank for decode's block 5."""
        return push_slice(name, self.decode.address, [1], [5], deadline_ms=120_000)

    def has_ended(self, name: str) -> bool:
        receipts = self.decode.worker.receipts()
        self.ended |= {request_id: request_id not in receipts.failed for request_id in receipts.ended}
        return name in self.ended

    def losses(self) -> list[str]:
        """Why attempts were given up, so far."""
        self.lost += [lost.reason for lost in self.decode.worker.losses()]
        return self.lost


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def test_ranks_on_two_nodes_push_one_prompt_together(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.expect(name)
        for rank in bench.ranks:
            rank.forward(bench.part(name))
        assert eventually(lambda name=name: bench.has_ended(name), timeout_s=PATIENCE_S), bench.losses()  # type: ignore[misc]  # bound
    assert bench.ended == {"a": True, "b": True}
    block = bench.cache.layers[:, 5].reshape(SHAPE.num_layers, 2, -1)
    assert np.array_equal(np.unique(block[:, 0]), [100])
    assert np.array_equal(np.unique(block[:, 1]), [101])


def test_data_parallel_ranks_of_one_engine_do_not_share_an_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """Each has a scheduler, and so a life, of its own: to decode they are two engines, whatever they are called."""
    with make_pair(settings=QUICK) as pair, another_prefill(pair, QUICK) as other:
        pair.expect("a", 2)
        pair.forward(pair.slice_of("a", [1], [5], is_last=False))
        assert pair.step_until(lambda: bool(pair.target.layers[:, 5].any()), timeout_s=PATIENCE_S)
        # Where this process has imported vLLM, its loggers hand nothing on to pytest's.
        logging.getLogger("vllm.pdcluster").addHandler(caplog.handler)
        other.forward(other.slice_of("a", [2, 3], [5, 6]))
        other.step(finished=["a"])
        assert other.step_until(lambda: other.released == {"a"}, timeout_s=PATIENCE_S)
        assert not pair.target.layers[:, 6].any()
        assert until(lambda: "another prefill engine holds the grant of this attempt" in caplog.text)
        logging.getLogger("vllm.pdcluster").removeHandler(caplog.handler)
