"""What proves that KV was pushed, what does not, and how long the prompt is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_protocol.params import Receipt
from pdcluster_router.core.requests.verification import (
    FIRST_WORDS,
    LEAST_WORDS,
    MAX_WORDS,
    Asked,
    Trial,
    next_num_words,
    num_random_bytes,
    problem_of,
    prompt_of,
)

ASKED = Asked(num_prompt_tokens=700, num_tokens=700, block_tokens=16)


def receipt(num_tokens: int) -> Receipt:
    return Receipt(num_tokens, pdcluster_is_content_compared=True)


PROOF = Trial(FIRST_WORDS, 200, "", ASKED, "", receipt(700))


def test_a_receipt_for_all_that_decode_asked_for_is_proof() -> None:
    assert problem_of(PROOF) == ""
    assert next_num_words(PROOF) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"asked": None, "receipt": None}, "decode answered alone"),
        ({"asked": None}, "it sent this router no reservation"),
        ({"status": 500, "error": "500: Internal server error", "asked": None}, "--advertise-url"),
        ({"status": 502, "error": "502: prefill-0 answered 500"}, "502: prefill-0 answered 500"),
        ({"prefill_problem": "decode hung up"}, "decode hung up"),
        ({"receipt": None}, "no receipt: run the same pdcluster"),
        ({"receipt": receipt(0)}, "decode received 0 of the 700 tokens"),
        ({"receipt": receipt(699)}, "decode received 699 of the 700 tokens"),
        ({"receipt": Receipt(700)}, "700 tokens and did not compare them with what prefill pushed: run the same"),
    ],
)
def test_anything_else_is_no_proof_and_says_why(changes: dict[str, Any], problem: str) -> None:
    trial = replace(PROOF, **changes)
    assert problem in problem_of(trial)
    assert next_num_words(trial) is None


def test_a_prompt_that_fills_no_block_is_followed_by_one_that_does() -> None:
    small = replace(PROOF, asked=Asked(400, 400, 2048), receipt=receipt(400))
    num_words = next_num_words(small)
    assert num_words == 1691
    assert num_words / FIRST_WORDS * 400 > 2048
    assert next_num_words(replace(small, num_words=num_words)) is None, "once, whatever comes of it"


def test_no_prompt_is_longer_than_the_longest() -> None:
    assert next_num_words(replace(PROOF, asked=Asked(2, 1, 1 << 20), receipt=receipt(1))) == MAX_WORDS


def test_prompts_that_decode_refuses_get_shorter_until_they_are_too_short() -> None:
    tried = [FIRST_WORDS]
    while (num_words := next_num_words(Trial(tried[-1], 400, "400: too long", None, "", None))) is not None:
        tried.append(num_words)
    assert tried == [300, 60, LEAST_WORDS]


def test_a_longer_prompt_that_is_refused_is_the_last_one() -> None:
    assert next_num_words(Trial(1691, 400, "400: too long", None, "", None)) is None


@pytest.mark.parametrize("num_words", [1, 2, FIRST_WORDS, 1691])
def test_a_prompt_has_so_many_short_words(num_words: int) -> None:
    prompt = prompt_of(num_words, bytes(range(256)) * 20)
    assert [len(word) for word in prompt.split(" ")] == [3] * num_words
    assert prompt == prompt_of(num_words, (bytes(range(256)) * 20)[: num_random_bytes(num_words)])


def test_prompts_of_other_bytes_begin_otherwise() -> None:
    assert prompt_of(2, b"\x01\x23\x45") == "abc def"
    assert prompt_of(2, b"\xff\xee\xdd") == "ppo onn"
