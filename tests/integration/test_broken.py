"""Tests of the tests: each connector that is broken on purpose is found out, by an error or by wrong tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from integration.harness import Harness, HttpError, Pool, complete, eventually, metric

pytestmark = pytest.mark.engines

PROMPT = [100 + (number * 11) % 800 for number in range(520)]


@pytest.fixture(scope="module")
def expected(harness: Harness) -> tuple[int, ...]:
    with harness.single_engine() as engine:
        return complete(engine.url, PROMPT, 16).token_ids


def broken_pool(harness: Harness, name: str) -> AbstractContextManager[Pool]:
    """A pool whose prefill engine runs the connector ``name`` of ``broken.py``."""
    connector = {"kv_connector": name, "kv_connector_module_path": "integration.broken"}
    return harness.start_pool(prefill_kv_transfer=connector, decode_connector={"quarantine_s": 3.0})


def blocks_in_use(pool: Pool) -> float:
    return sum(metric(engine.url, "vllm:kv_cache_usage_perc") for engine in pool.engines)


@pytest.mark.parametrize(
    "name",
    [
        "CallsFailuresDone",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("SkipsALayer", "SwapsTwoBlocks", "CutsARangeShort")),
    ],
)
def test_bytes_that_are_not_where_decode_reads_them_change_the_answer(
    harness: Harness, expected: tuple[int, ...], name: str
) -> None:
    with broken_pool(harness, name) as pool:
        answer = complete(pool.url, PROMPT, 16).token_ids
        assert answer != expected
        assert len(answer) == len(expected)


@pytest.mark.parametrize(("name", "reason"), [("OmitsABlock", "decode expects"), ("FailsEveryWrite", "a write of")])
def test_missing_bytes_are_one_clear_error_and_every_block_comes_back(harness: Harness, name: str, reason: str) -> None:
    with broken_pool(harness, name) as pool:
        with pytest.raises(HttpError) as error:
            complete(pool.url, PROMPT, 16)
        assert error.value.status >= 500
        (line,) = pool.decode[0].read_trace("receive")
        assert (line["outcome"], reason in line["reason"]) == ("failed", True), line
        assert eventually(lambda: blocks_in_use(pool) == 0)
