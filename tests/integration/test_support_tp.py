"""Any prefill TP to any decode TP, on real engines: nine pairs for each number of KV heads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from integration.harness import Harness
from zoo import pools
from zoo.models import LLAMA_6KV, llama
from zoo.pools import Case, Shape

pytestmark = pytest.mark.engines

SIZES = (1, 2, 4)


def check_all_pairs(
    harness: Harness, case: Case, prefill_sizes: tuple[int, ...], decode_sizes: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Every pair has prompts of its own, so that no cache stands in for a push; then longer ones, for the caches.

    What prefill's ranks traced of each push.
    """
    pairs = list(itertools.product(range(len(prefill_sizes)), range(len(decode_sizes))))
    prompts = [pools.make_prompts(case.lengths, seed) for seed in range(len(pairs))]
    rounds = [(first, pools.longer(first[-2:], case.more)) for first in prompts]
    said = pools.ask_single(harness, case, [prompt for both in rounds for half in both for prompt in half])
    assert sum(one.is_clear(pools.FULL_ROUNDING) for one in said) >= 0.9 * len(said)
    answer = iter(said)
    shapes = [Shape(tp=size) for size in prefill_sizes], [Shape(tp=size) for size in decode_sizes]
    with pools.engines(harness, case, *shapes) as (prefills, decodes):
        for (i, j), both in zip(pairs, rounds, strict=True):
            seen = len(decodes[j].read_trace("receive"))
            with harness.router([prefills[i]], [decodes[j]]) as router:
                for half in both:
                    wanted = list(itertools.islice(answer, len(half)))
                    rounding = case.rounding(shapes[0][i], shapes[1][j])
                    given = pools.answers(router.url, half)
                    assert pools.wrong(wanted, given, rounding) == [], (prefill_sizes[i], decode_sizes[j])
            pools.require_pushed(prefills[i], decodes[j], seen, at_least=len(case.lengths) + 2)
        return [push for prefill in prefills for push in prefill.read_trace("push")]


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@pytest.mark.slow
def test_every_pair_of_tp_1_2_4_answers_like_a_single_engine(harness: Harness, kv_heads: int) -> None:
    check_all_pairs(harness, Case(llama(kv_heads)), SIZES, SIZES)


@pytest.mark.parametrize(("prefill", "decode"), [(3, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_tp_sizes_that_do_not_divide_each_other_answer_like_a_single_engine(
    harness: Harness, prefill: int, decode: int
) -> None:
    check_all_pairs(harness, Case(LLAMA_6KV), (prefill,), (decode,))


@pytest.mark.slow
def test_engines_whose_small_strips_are_gathered_answer_like_a_single_engine(harness: Harness) -> None:
    """A head of 32 tokens has 8 KiB here; fresh pools have neighbours."""
    pushes = check_all_pairs(harness, Case(llama(2), ("--block-size", "32")), (1,), (2,))
    assert sum(push["writes"] for push in pushes) < sum(push["ranges"] for push in pushes) / 2
