"""When an answer that is not the reference's is wrong, and which engine may be a reference at all."""

from __future__ import annotations

import pytest

from zoo.cases import CASES, TP2
from zoo.models import llama
from zoo.pools import FULL_ROUNDING, ONE, REDUCED_ROUNDING, Case, Said, Shape, wrong

SAID = Said((1, 2, 3), (7, 8, 9), (0.5, 0.0004, 0.5))
NAMES = [name for name in CASES if "draft" not in name]
"""A draft model must be made before its case is."""


@pytest.mark.parametrize(
    ("answer", "rounding", "step"),
    [
        ((7, 8, 9), 0.0, None),
        ((7, 5, 9), 0.001, None),
        ((7, 5, 4), 0.001, None),
        ((5, 8, 9), 0.001, 0),
        ((7, 8, 4), 0.001, 2),
        ((7, 5, 9), 0.0, 1),
    ],
    ids=["its own", "a close choice", "and all later ones", "a clear choice", "the last", "engines that compute alike"],
)
def test_a_token_may_differ_where_the_choice_was_within_rounding(
    answer: tuple[int, ...], rounding: float, step: int | None
) -> None:
    told = [text.partition("; margin ")[2] for text in wrong([SAID], [answer], rounding)]
    expected = f"{SAID.margins[step]:.4f} at token {step}, rounding {rounding}" if step is not None else ""
    assert told == [expected] * bool(expected)
    assert (SAID.is_clear(0.001), SAID.is_clear(0.0004)) == (False, True)


@pytest.mark.parametrize("name", NAMES)
def test_engines_of_few_bits_are_compared_with_one_that_is_split_like_decode(name: str) -> None:
    """``delta net`` and ``fp8`` are some."""
    case = CASES[name]()
    assert case.is_reduced or not name.startswith(("delta net", "fp8"))
    assert case.reference == (case.decode if case.is_reduced else ONE)
    is_alike = case.prefill == case.decode == case.reference
    assert (case.rounding(case.prefill, case.decode) > case.doubt) == (not is_alike and case.doubt < FULL_ROUNDING)


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
