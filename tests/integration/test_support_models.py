"""Every kind of KV that vLLM has, through a pool: greedy answers equal a single engine's.

Prompts shorter than a block, of one block, of several, of several chunks; then the same ones, longer: both sides find
their beginnings in the prefix cache, where the model has one.
"""

from __future__ import annotations

from typing import Final

import pytest

from integration.harness import Harness, metric
from pdcluster_cli.processes.waiting import EngineDied
from zoo import pools
from zoo.cases import CASES

pytestmark = pytest.mark.engines


QUICK: Final = frozenset({
    "mistral 2 to 1",  # one window, fewer ranks
    "gemma3",  # windows beside full layers
    "mla 1 to 2",  # latent, copied to each rank
    "delta net 2 to 2",  # state and attention, of equal ranks
    "mamba2",  # state alone
    "fp8 2 to 1",  # another width of a number
    "pipeline 2 to tp 2",  # layers on other ranks
    "eagle",  # a draft model that writes on behind the prompt
})  # fmt: skip
"""One of each layout; the others differ from one of them in one thing."""
assert CASES.keys() >= QUICK


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_pool_answers_like_a_single_engine(harness: Harness, name: str) -> None:
    case = CASES[name]()
    if not case.runs_here:
        with pytest.raises(EngineDied, match="requires x86 with AVX-512 or AMX"):
            pools.ask_single(harness, case, pools.make_prompts((40,), seed=11))
        return
    first = pools.make_prompts(case.lengths, seed=11)
    said = pools.ask_single(harness, case, [*first, *pools.longer(first, case.more)])
    rounding = case.rounding(case.prefill, case.decode)
    assert sum(one.is_clear(rounding) for one in said) >= 6, [one.margins for one in said]
    with pools.engines(harness, case, [case.prefill], [case.decode]) as (prefills, decodes):
        with harness.router(prefills, decodes) as router:
            answers = pools.answers(router.url, [one.prompt for one in said], case.concurrency)
        assert pools.wrong(said, answers, rounding) == []
        assert len(set(answers)) == len(answers)
        if case.decode.guesses:
            assert metric(decodes[0].url, "vllm:spec_decode_num_draft_tokens_total") > 0
        pools.require_pushed(prefills[0], decodes[0], seen=0, at_least=len(said))
