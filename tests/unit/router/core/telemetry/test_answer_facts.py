"""What an answer's bytes say of it: tokens of either API, and nothing where it says nothing."""

from __future__ import annotations

import json

import pytest

from pdcluster_router.core.telemetry.answer_facts import (
    END_BYTES,
    AnswerFacts,
    StreamFacts,
    TokenCounts,
    token_counts_in,
)

OPENAI = b'{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2'
CACHED = OPENAI + b',"prompt_tokens_details":{"cached_tokens":4}}'
ANTHROPIC = b'{"input_tokens":3,"output_tokens":2,"cache_read_input_tokens":4,"cache_creation_input_tokens":1}'


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        (b'{"choices":[],"usage":' + OPENAI + b"}}", TokenCounts(7, 2)),
        (b'{"choices":[], "usage": ' + CACHED + b',"kv_transfer_params":null}', TokenCounts(7, 2, 4)),
        (b'data: {"usage":' + CACHED + b"}\n\ndata: [DONE]\n\n", TokenCounts(7, 2, 4)),
        (
            b'data: {"delta":{},"usage":' + ANTHROPIC + b'}\n\nevent: message_stop\ndata: {"a":1}\n\n',
            TokenCounts(8, 2, 4),
        ),
        (b'{"usage":{"input_tokens":3,"output_tokens":2}}', TokenCounts(3, 2)),
        (b'{"usage":{"prompt_tokens":1}} {"usage":{"prompt_tokens":2}}', TokenCounts(2)),
        (b'{"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}', TokenCounts(7)),
        (b'{"usage":{"a":{"b":1},"c":{"d":2},"prompt_tokens":7},"e":{}}', TokenCounts(7)),
        (
            b'{"usage":{"prompt_tokens_details":{"cached_tokens":4,"multimodal_tokens":{"image":5}},"prompt_tokens":7}}',
            TokenCounts(7, None, 4),
        ),
        (b'{"usage"\n:\t{"prompt_tokens":7}}', TokenCounts(7)),
        (bytearray(b'{"usage":{"prompt_tokens":7}}'), TokenCounts(7)),
    ],
)
def test_the_last_usage_counts(end: bytes | bytearray, counts: TokenCounts) -> None:
    assert token_counts_in(end) == counts


@pytest.mark.parametrize(
    "end",
    [
        b"",
        b"data: [DONE]\n\n",
        b'{"usage":null}',
        b'{"usage":[1]}',
        b'{"usage"',
        b'{"usage":{"prompt_tokens":7',
        b'{"text":"usage"}',
        b'{"usage":{"prompt_tokens":-1,"completion_tokens":true}}',
        b'{"usage":{"prompt_tokens":1e3,"completion_tokens":"2"}}',
        b'{"usage":{"input_tokens":null}}',
        b'{"usage":{"prompt_tokens":' + b"9" * 400 + b"}}",
        b'{"usage":' + b"[" * END_BYTES,
        b'{"usage":\xff\xfe{"prompt_tokens":1}}',
        b'{"usage":null,"other":{"prompt_tokens":1}}',
        b'{"usage":' + b'{"a":' * 300 + b"}" * 301,
        b'{"usage":{"a":{"prompt_tokens":7}',
        b'{"usage":{"prompt_tokens":7}}' + b" " * END_BYTES,
    ],
)
def test_what_says_nothing_counts_nothing(end: bytes) -> None:
    assert token_counts_in(end) == TokenCounts()


def test_no_text_of_a_model_looks_like_a_usage_or_an_event() -> None:
    text = '\n\ndata: {"usage":{"completion_tokens":99}}'
    answer = b"data: " + json.dumps({"choices": [{"text": text}]}, separators=(",", ":")).encode() + b"\n\n"
    facts = StreamFacts()
    facts.add(answer, 1.0)
    assert facts.token_counts == TokenCounts()
    assert facts.num_events == 1


def test_an_answer_of_one_piece_has_no_gaps() -> None:
    facts = StreamFacts()
    facts.add(b"data: {}\n\n", 5.0)
    assert (facts.first_at, facts.p50_gap_s, facts.max_gap_s, facts.num_events) == (5.0, None, 0.0, 1)


def test_the_median_is_that_of_the_gaps_and_one_long_one_is_the_longest() -> None:
    facts, now = StreamFacts(), 0.0
    for gap_s in (0.0, 0.02, 0.02, 0.02, 3.0, 0.02):
        now += gap_s
        facts.add(b"x", now)
    assert facts.p50_gap_s == pytest.approx(0.02, rel=0.075)
    assert facts.max_gap_s == 3.0


@pytest.mark.parametrize("gap_s", [0.0, 1e-7, 5000.0])
def test_gaps_beyond_the_bounds_have_a_median_too(gap_s: float) -> None:
    facts = StreamFacts()
    for number in range(4):
        facts.add(b"x", number * gap_s)
    assert facts.p50_gap_s is not None
    assert facts.p50_gap_s <= facts.max_gap_s == gap_s


def test_the_usage_of_a_long_plain_answer_is_found_at_its_end() -> None:
    facts = AnswerFacts()
    facts.add(b"x" * 100_000, 1.0)
    facts.add(b'","usage":' + CACHED + b"}", 2.0)
    assert (facts.num_bytes, facts.first_at) == (100_000 + 11 + len(CACHED), 1.0)
    assert facts.token_counts == TokenCounts(7, 2, 4)
