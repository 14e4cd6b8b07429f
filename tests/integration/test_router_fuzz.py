"""A short run of raw bytes to a router process, under the limits of the long one (``fuzz/wire.py``)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fuzz.raw import Input
from fuzz.wire import (
    MAX_GROWTH_BYTES,
    MAX_STALL_S,
    Outcome,
    Run,
    codes_of_503_in,
    end_of,
    fuzz,
    limits_passed,
    report_of,
    tracebacks_in,
)

NUM_INPUTS = 4_000


def test_raw_bytes_neither_end_nor_fill_nor_stop_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # As the fuzzer's own command has it.
    outcome = fuzz(NUM_INPUTS, seed=2026)
    assert outcome.problems == [], outcome.text
    assert outcome.num_answers > NUM_INPUTS // 5  # Those of whole requests alone: it was asked something.


@pytest.mark.parametrize(
    ("statuses", "is_whole", "num_problems"),
    [([400, 200], True, 0), ([400], True, 1), ([400], False, 0), ([200, 200, 400], False, 1), ([500], False, 1)],
)
def test_the_fuzzer_finds_an_answer_too_many_one_too_few_and_an_internal_error(
    statuses: list[int], is_whole: bool, num_problems: int
) -> None:
    run = Run(("a", 1), ("a", 2))
    run.judge(Input((b"x",), False, 2, is_whole=is_whole), statuses)
    assert len(run.problems) == num_problems
    assert run.statuses == Counter(statuses)


def test_the_fuzzer_finds_growth_a_stall_and_a_traceback() -> None:
    assert limits_passed(MAX_GROWTH_BYTES, MAX_STALL_S) == []
    assert len(limits_passed(MAX_GROWTH_BYTES + 1, MAX_STALL_S + 0.001)) == 2
    log = "a line\nERROR uvicorn\nTraceback (most recent call last):\n  File x\n    code\nValueError: y\nmore\n"
    assert tracebacks_in(log) == [
        "ERROR uvicorn\nTraceback (most recent call last):\n  File x\n    code\nValueError: y"
    ]


def test_answers_with_503_are_told_by_their_code() -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 40\r\n\r\n"
    body = b'{"error":{"code":"not_ready","message":""}}'
    assert codes_of_503_in(b"HTTP/1.1 200 OK\r\n\r\n" + head + body + head) == ["not_ready", "HEAD"]


def test_engines_read_the_routers_keys_of_a_large_body() -> None:
    ours = b'"kv_transfer_params":{"do_remote_decode":true}}'
    assert end_of(b'{"prompt":"kv","kv_transfer_params":1,' + ours) == b"{" + ours
    assert end_of(b'{"prompt":"kv"}') == b"{}"


def test_the_page_of_a_run_says_what_it_was_what_came_and_what_was_wrong() -> None:
    outcome = Outcome(
        "text", 12.3, 5 << 20, (0.0123, 0.4), Counter({400: 1234, 200: 5}), ["answered [500]"], Counter(not_ready=3)
    )
    page = report_of(outcome, 2_000, seed=7)
    for line in (
        "--inputs 2000 --seed 7",
        "2,000 in 12 s",
        "| 5.0 MiB |",
        "| 12.3 ms |",
        "- answered [500]",
        "code: 3 `not_ready`.",
    ):
        assert line in page
    assert page.index("| 200 | 5 |") < page.index("| 400 | 1,234 |")
