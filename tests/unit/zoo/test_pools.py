"""When an answer that is not the reference's is wrong, and which engine may be a reference at all."""

from __future__ import annotations

import pytest

from zoo.cases import CASES, TP2
from zoo.models import llama
from zoo.pools import FULL_ROUNDING, ONE, REDUCED_ROUNDING, Case, Said, Shape, wrong

SAID = Said((1, 2, 3), (7, 8, 9), (0.5, 0.0004, 0.5))
NAMES = [name for name in CASES if "draft" not in name]
"""A draft model must be made before its case is."""


def test_the_references_own_tokens_are_right() -> None:
    assert wrong([SAID], [(7, 8, 9)], 0.0) == []


@pytest.mark.parametrize("answer", [(7, 5, 9), (7, 5, 4)])
def test_a_token_may_differ_where_the_choice_was_within_rounding_and_then_all_later_ones(
    answer: tuple[int, ...],
) -> None:
    assert wrong([SAID], [answer], 0.001) == []


@pytest.mark.parametrize(("answer", "step"), [((5, 8, 9), 0), ((7, 8, 4), 2)])
def test_a_token_that_differs_at_a_clear_choice_is_wrong(answer: tuple[int, ...], step: int) -> None:
    (text,) = wrong([SAID], [answer], 0.001)
    assert (
        text
        == f"prompt of 3 tokens: {answer}, the reference says (7, 8, 9); margin 0.5000 at token {step}, rounding 0.001"
    )


def test_engines_that_compute_alike_may_differ_nowhere() -> None:
    assert wrong([SAID], [(7, 5, 9)], 0.0) != []


def test_a_reference_is_clear_when_no_choice_was_within_rounding() -> None:
    assert (SAID.is_clear(0.001), SAID.is_clear(0.0004)) == (False, True)


@pytest.mark.parametrize("name", NAMES)
def test_engines_of_few_bits_are_compared_with_one_that_is_split_like_decode(name: str) -> None:
    case = CASES[name]()
    assert case.reference == (case.decode if case.is_reduced else ONE)
    is_alike = case.prefill == case.decode == case.reference
    assert (case.rounding(case.prefill, case.decode) > case.doubt) == (not is_alike and case.doubt < FULL_ROUNDING)


def test_there_are_cases_of_few_bits() -> None:
    reduced = {name for name in NAMES if CASES[name]().is_reduced}
    assert reduced >= {"delta net", "delta net 2 to 2", "delta net without cache", "fp8", "fp8 2 to 1"}


@pytest.mark.parametrize(
    ("args", "prefill", "decode", "rounding"),
    [
        ((), ONE, ONE, 0.0),
        ((), TP2, ONE, FULL_ROUNDING),
        ((), TP2, TP2, FULL_ROUNDING),
        (("--dtype", "bfloat16"), TP2, TP2, 0.0),
        (("--kv-cache-dtype", "fp8"), TP2, ONE, REDUCED_ROUNDING),
        (("--dtype", "bfloat16"), ONE, Shape(pp=2), REDUCED_ROUNDING),
    ],
)
def test_rounding_is_that_of_the_splits_and_bits(
    args: tuple[str, ...], prefill: Shape, decode: Shape, rounding: float
) -> None:
    assert Case(llama(1), args, prefill, decode).rounding(prefill, decode) == rounding
