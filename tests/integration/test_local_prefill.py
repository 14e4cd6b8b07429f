"""A decode engine that computes few missing tokens itself answers like a single engine, and still proves its pushes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import pytest

from integration.harness import Harness, Pool, Server, blocks_in_use, complete, complete_all, eventually, metric
from integration.test_verify_engines import verify
from pdcluster_cli.processes.engines import EnginePlan, PoolRole
from zoo import pools
from zoo.cases import CASES

pytestmark = pytest.mark.engines

LEAST: Final = 200
"""The zoo's prompts of 40 to 129 tokens are below it, those of 300 and more are not; what a prompt of the first round
lacks when it comes back longer is below it too."""
ALL_LOCAL: Final = 8192


def local(plan: EnginePlan, least: int = LEAST) -> EnginePlan:
    return dataclasses.replace(plan, connector={**plan.connector, "min_push_tokens": least})


def num_local(*decodes: Server) -> float:
    return sum(map(_num_local, decodes))


def _num_local(decode: Server) -> float:
    """An engine counts them from its first one on."""
    with suppress(KeyError):
        return metric(decode.url, "pdcluster:local_prefills_total")
    return 0.0


@pytest.mark.parametrize(
    "name",
    [
        "mistral 2 to 1",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "gemma3",
                "mla 1 to 2",
                "mamba2",
                "mamba2 2 to 1",
                "delta net 2 to 2",
                "ngram on decode alone",
                "eagle on decode alone",
                "mtp on decode alone",
                "no cache",
                "data parallel decode",
                "pipeline 2 to tp 2",
            )
        ),
    ],
)
def test_pushed_and_local_prompts_answer_like_a_single_engine(harness: Harness, name: str) -> None:
    case = CASES[name]()
    first = pools.make_prompts(case.lengths, seed=11)
    second = pools.longer(first, case.more)
    said = pools.ask_single(harness, case, [*first, *second])
    prefill = pools.plan_engine(harness, PoolRole.PREFILL, case, case.prefill)
    decode = local(pools.plan_engine(harness, PoolRole.DECODE, case, case.decode))
    with harness.start(prefill, decode) as servers, harness.router(servers[:1], servers[1:]) as router:
        answers = [
            answer for prompts in (first, second) for answer in pools.answers(router.url, prompts, case.concurrency)
        ]
        assert pools.wrong(said, answers, case.rounding(case.prefill, case.decode)) == []
        assert eventually(lambda: num_local(servers[1]) > 0)
        pools.require_pushed(servers[0], servers[1], seen=0, at_least=1)
        pools.require_no_block_in_use(servers)


@pytest.fixture(scope="module")
def single(harness: Harness) -> Iterator[Server]:
    with harness.single_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def all_local(harness: Harness) -> Iterator[Pool]:
    """Decode computes every prompt itself; its 6 MiB hold 12 blocks of 128 tokens."""
    small = ("--kv-cache-memory-bytes", str(6 << 20), "--max-model-len", "1400")
    with harness.start_pool(decode_args=small, decode_connector={"min_push_tokens": ALL_LOCAL}) as pool:
        yield pool


def test_only_what_is_missing_counts_and_the_router_learns_of_it(harness: Harness, single: Server) -> None:
    prompt = pools.make_prompts((640,), seed=5)[0]
    prompts = [prompt[:100], prompt, [*prompt, *range(100, 170)]]
    wanted = [complete(single.url, one, 32).token_ids for one in prompts]
    with harness.start_pool(decode_connector={"min_push_tokens": 128}) as pool:
        # 100 tokens behind nothing; 640 behind nothing; 70 behind the 640, which are 5 whole blocks.
        assert [complete(pool.url, one, 32).token_ids for one in prompts] == wanted
        assert eventually(lambda: num_local(*pool.decode) == 2)
        assert metric(pool.decode[0].url, "pdcluster:local_prefill_tokens_total") == 170
        assert eventually(lambda: len(pool.router.read_trace("request")) == len(prompts))  # threads write the traces
        assert eventually(lambda: len(pool.decode[0].read_trace("receive")) == 1)
        asked = sorted(pool.router.read_trace("request"), key=lambda line: line["received_at"])
        assert [(line["prompt_tokens"], line["cached_tokens"]) for line in asked] == [(100, 0), (640, 0), (710, 640)]
        assert [line["prefill_sent_at"] is None for line in asked] == [True, False, True]
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)


def test_local_prompts_that_are_preempted_are_computed_again_and_answer_the_same(
    single: Server, all_local: Pool
) -> None:
    """Each of these prompts takes a block, and each answer a second one."""
    num_pushed, num_before = len(all_local.prefill[0].read_trace("push")), num_local(*all_local.decode)
    prompts: Sequence[list[int]] = pools.make_prompts([120] * 12, seed=7)
    wanted = [answer.token_ids for answer in complete_all(single.url, prompts, 64)]
    assert [answer.token_ids for answer in complete_all(all_local.url, prompts, 64)] == wanted
    assert metric(all_local.decode[0].url, "vllm:num_preemptions_total") > 0
    assert len(all_local.prefill[0].read_trace("push")) == num_pushed
    assert eventually(lambda: num_local(*all_local.decode) == num_before + len(prompts))
    assert eventually(lambda: blocks_in_use(*all_local.engines) == 0)


def test_a_verification_is_pushed_whatever_decode_would_compute_itself(all_local: Pool) -> None:
    num_before = len(all_local.decode[0].read_trace("receive"))
    assert complete(all_local.url, "Why is the sky blue? " * 40, 4).text
    assert len(all_local.decode[0].read_trace("receive")) == num_before
    status, told = verify(all_local)
    assert (status, told["verified"]) == (200, True)
    assert told["pushed_tokens"] == told["prompt_tokens"] >= 300
    assert eventually(lambda: len(all_local.decode[0].read_trace("receive")) == num_before + 1)
