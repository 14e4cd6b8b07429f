"""The push overlaps the forward pass: an event trace of real engines shows it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import Harness, Pool, complete, complete_all, eventually
from pdcluster_cli.models.tiny_model import ModelShape, ensure_tiny_model

pytestmark = pytest.mark.engines

NUM_LAYERS = 16
ONE_STEP = ("--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
SAVED_AT, WRITE_BEGIN, ACKED_AT, NUM_BYTES = 2, 3, 4, 5


@pytest.fixture(scope="module")
def deep_model() -> Path:
    """16 layers: the last layer, which nothing can hide, is 6 % of the bytes. Wide enough to be bound by compute."""
    return ensure_tiny_model(ModelShape(num_layers=NUM_LAYERS, hidden=512, intermediate=1024))


@pytest.fixture(scope="module")
def deep_pool(harness: Harness, deep_model: Path) -> Iterator[Pool]:
    with harness.start_pool(model=deep_model, prefill_args=ONE_STEP, decode_args=ONE_STEP) as pool:
        yield pool


def pushes_of(pool: Pool, repeats: int = 5) -> list[dict[str, Any]]:
    num_before = len(pool.prefill[0].read_trace("push"))
    prompts = [[100 + (number * (7 + turn)) % 800 for number in range(2000)] for turn in range(repeats + 1)]
    for prompt in prompts:
        complete(pool.url, prompt, 1)
    assert eventually(lambda: len(pool.prefill[0].read_trace("push")) == num_before + len(prompts))
    return pool.prefill[0].read_trace("push")[num_before + 1 :]  # the first opens connections


def hidden_share(push: dict[str, Any]) -> float:
    """Share of the bytes that were acknowledged before the forward pass ended."""
    hidden = sum(row[NUM_BYTES] for row in push["layers"] if row[ACKED_AT] <= push["forward_end"])
    return float(hidden / push["num_bytes"])


def begins_in_time(push: dict[str, Any]) -> bool:
    """Whether the first layer's write begins before the second layer ends."""
    rows = push["layers"]
    return bool(rows[0][WRITE_BEGIN] < rows[1][SAVED_AT])


def test_layers_leave_while_the_next_one_is_computed(deep_pool: Pool) -> None:
    pushes = pushes_of(deep_pool)
    for push in pushes:
        rows = push["layers"]
        assert len(rows) == NUM_LAYERS
        assert push["outcome"] == "done"
        assert all(row[SAVED_AT] <= row[WRITE_BEGIN] <= row[ACKED_AT] for row in rows), (
            "nothing leaves before it is final"
        )
    assert statistics.median(map(begins_in_time, pushes)), "the first layer's write begins before the second layer ends"
    assert statistics.median(map(hidden_share, pushes)) >= 0.8


@pytest.mark.slow
def test_a_serial_push_hides_nothing_so_the_measure_can_fail(harness: Harness, deep_model: Path) -> None:
    with harness.start_pool(
        model=deep_model, prefill_args=ONE_STEP, decode_args=ONE_STEP, prefill_connector={"push": "serial"}
    ) as pool:
        pushes = pushes_of(pool, repeats=1)
    assert [hidden_share(push) for push in pushes] == [0.0]


def test_requests_of_one_step_share_their_writes_in_time(deep_pool: Pool) -> None:
    """Two prompts in one forward pass: each layer of both leaves before the next layer of either."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for push in _pushed_together(deep_pool, [[101 + turn] * 300 for turn in range(8)]):
        by_step.setdefault(push["layers"][0][0], []).append(push)
    fused = max(by_step.values(), key=len)
    assert len(fused) > 1, "no two requests ran in one step"
    for layer in range(NUM_LAYERS - 1):
        last_begin = max(push["layers"][layer][WRITE_BEGIN] for push in fused)
        assert all(last_begin <= push["layers"][layer + 1][WRITE_BEGIN] for push in fused)


def _pushed_together(pool: Pool, prompts: list[list[int]]) -> list[dict[str, Any]]:
    num_before = len(pool.prefill[0].read_trace("push"))
    complete_all(pool.url, prompts, 1)
    assert eventually(lambda: len(pool.prefill[0].read_trace("push")) == num_before + len(prompts))
    return pool.prefill[0].read_trace("push")[num_before:]
