"""Tests of the tests: each connector that is broken on purpose is found out, by an error or by wrong tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from integration.harness import Harness, HttpError, Pool, blocks_in_use, complete, eventually, metric
from integration.prompts import PROMPT
from integration.test_verify_engines import verify

pytestmark = pytest.mark.engines


def broken_pool(
    harness: Harness, name: str, content_check: str = "off", on_failure: str = "fail"
) -> AbstractContextManager[Pool]:
    """A pool whose prefill engine runs the connector ``name`` of ``broken.py``."""
    connector = {"kv_connector": name, "kv_connector_module_path": "integration.broken"}
    return harness.start_pool(
        prefill_kv_transfer=connector,
        decode_connector={"quarantine_s": 3.0, "content_check": content_check},
        load_failure_policy=on_failure,
    )


def num_mismatches(pool: Pool) -> float:
    return metric(pool.decode[0].url, "pdcluster:failures_total", 'kind="content_differs"')


@pytest.mark.costly
@pytest.mark.parametrize("name", ["LosesAWriteOnce", pytest.param("SwapsTwoBlocks", marks=pytest.mark.slow)])
def test_content_that_is_wrong_is_pushed_again_and_the_answer_is_exact(
    harness: Harness, expected: dict[int, tuple[int, ...]], name: str
) -> None:
    with broken_pool(harness, name, "full") as pool:
        assert complete(pool.url, PROMPT, 16).token_ids == expected[len(PROMPT)]
        (line,) = pool.decode[0].read_trace("receive", 1)
        assert line["outcome"] == "received"
        assert eventually(lambda: num_mismatches(pool) == 1)
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)


def test_content_that_is_always_wrong_is_recomputed_and_never_answered_from(
    harness: Harness, expected: dict[int, tuple[int, ...]]
) -> None:
    with broken_pool(harness, "SkipsALayer", "full", "recompute") as pool:
        assert complete(pool.url, PROMPT, 16).token_ids == expected[len(PROMPT)]
        (line,) = pool.decode[0].read_trace("receive", 1)
        assert line["outcome"] == "failed"
        assert eventually(lambda: num_mismatches(pool) == 2)
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)


@pytest.mark.parametrize("check", ["sampled", pytest.param("full", marks=pytest.mark.slow)])
def test_content_of_which_nothing_came_is_one_clear_error(harness: Harness, check: str) -> None:
    with broken_pool(harness, "CallsFailuresDone", check) as pool:
        with pytest.raises(HttpError) as error:
            complete(pool.url, PROMPT, 16)
        assert error.value.status >= 500
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)


@pytest.mark.parametrize(
    "name",
    [
        "SwapsTwoBlocks",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("CallsFailuresDone", "SkipsALayer", "CutsARangeShort")
        ),
    ],
)
def test_bytes_that_every_count_finds_right_change_the_answer_and_verify_nothing(
    harness: Harness, expected: dict[int, tuple[int, ...]], name: str
) -> None:
    with broken_pool(harness, name) as pool:
        status, told = verify(pool)
        assert status == 409
        assert "the content is not what was pushed: layer " in told["error"]["message"]
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        answer = complete(pool.url, PROMPT, 16).token_ids
        assert answer != expected[len(PROMPT)]
        assert len(answer) == 16


@pytest.mark.parametrize(("name", "reason"), [("OmitsABlock", "decode expects"), ("FailsEveryWrite", "a submit with")])
def test_missing_bytes_are_one_clear_error_and_every_block_comes_back(harness: Harness, name: str, reason: str) -> None:
    with broken_pool(harness, name) as pool:
        with pytest.raises(HttpError) as error:
            complete(pool.url, PROMPT, 16)
        assert error.value.status >= 500
        (line,) = pool.decode[0].read_trace("receive", 1)
        assert (line["outcome"], reason in line["reason"]) == ("failed", True), line
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
