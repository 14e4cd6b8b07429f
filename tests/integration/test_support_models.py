"""Every kind of KV that vLLM has, through a pool: greedy answers equal a single engine's.

Prompts shorter than a block, of one block, of several, of several chunks; then the same ones, longer: both sides find
their beginnings in the prefix cache, where the model has one.
"""

from __future__ import annotations

import pytest

from integration.harness import Harness
from zoo import pools
from zoo.cases import CASES

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", CASES)
def test_a_pool_answers_like_a_single_engine(harness: Harness, name: str) -> None:
    case = CASES[name]()
    first = pools.make_prompts(case.lengths, seed=11)
    said = pools.ask_single(harness, case, [*first, *pools.longer(first, case.more)])
    clear = [one for one in said if one.margin >= case.doubt]
    assert len(clear) >= 6
    with pools.engines(harness, case, [case.prefill], [case.decode]) as (prefills, decodes):
        with harness.router(prefills, decodes) as router:
            answers = pools.answers(router.url, [one.prompt for one in clear], case.concurrency)
        assert answers == [one.token_ids for one in clear]
        assert len(set(answers)) == len(answers)
        pools.require_pushed(prefills[0], decodes[0], seen=0, at_least=len(clear))
