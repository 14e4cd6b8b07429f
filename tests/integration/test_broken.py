"""Tests of the tests: each connector that is broken on purpose is found out, by an error or by wrong tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from integration.harness import Harness, HttpError, Pool, blocks_in_use, complete, eventually
from integration.prompts import PROMPT
from integration.test_verify_engines import verify

pytestmark = pytest.mark.engines


def broken_pool(harness: Harness, name: str) -> AbstractContextManager[Pool]:
    """A pool whose prefill engine runs the connector ``name`` of ``broken.py``."""
    connector = {"kv_connector": name, "kv_connector_module_path": "integration.broken"}
    return harness.start_pool(prefill_kv_transfer=connector, decode_connector={"quarantine_s": 3.0})


@pytest.mark.parametrize(
    "name",
    [
        "CallsFailuresDone",
        "SwapsTwoBlocks",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("SkipsALayer", "CutsARangeShort")),
    ],
)
def test_bytes_that_every_count_finds_right_change_the_answer_and_verify_nothing(
    harness: Harness, expected: dict[int, tuple[int, ...]], name: str
) -> None:
    with broken_pool(harness, name) as pool:
        status, told = verify(pool)
        assert status == 409
        assert "the content is not what was pushed: its digest is" in told["error"]["message"]
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        answer = complete(pool.url, PROMPT, 16).token_ids
        assert answer != expected[len(PROMPT)]
        assert len(answer) == 16


@pytest.mark.parametrize(("name", "reason"), [("OmitsABlock", "decode expects"), ("FailsEveryWrite", "a write of")])
def test_missing_bytes_are_one_clear_error_and_every_block_comes_back(harness: Harness, name: str, reason: str) -> None:
    with broken_pool(harness, name) as pool:
        with pytest.raises(HttpError) as error:
            complete(pool.url, PROMPT, 16)
        assert error.value.status >= 500
        (line,) = pool.decode[0].read_trace("receive")
        assert (line["outcome"], reason in line["reason"]) == ("failed", True), line
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
