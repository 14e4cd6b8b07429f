"""The comparison of policies: its traces, its caches, and that its figures can be told apart."""

from __future__ import annotations

import random

import pytest
from benchmarks.policies import by_chance, measure
from benchmarks.pool_model import Pool, PrefixCache, oracle_hits
from benchmarks.traces import BLOCK_TOKENS, CHATS, Asked, made

from pdcluster_protocol.labels import Role
from pdcluster_router.core.policies.affinity import affinity


@pytest.fixture(scope="module")
def trace() -> list[Asked]:
    return made(random.Random(1), [(CHATS, 60)])


def test_a_seed_makes_one_trace(trace: list[Asked]) -> None:
    again, other = (made(random.Random(seed), [(CHATS, 60)]) for seed in (1, 2))
    assert [(one.at, one.blocks) for one in again] == [(one.at, one.blocks) for one in trace]
    assert [one.at for one in other] != [one.at for one in trace]


def test_a_turn_begins_with_what_the_one_before_has_left(trace: list[Asked]) -> None:
    last: dict[str, Asked] = {}
    for asked in trace:
        if before := last.get(asked.session):
            assert asked.blocks[: len(before.with_answer)] == before.with_answer
            assert asked.request.body.num_bytes > before.request.body.num_bytes
        last[asked.session] = asked


def test_a_body_has_about_as_many_tokens_as_its_blocks(trace: list[Asked]) -> None:
    for asked in trace:
        assert asked.request.body.estimated_prompt_tokens == pytest.approx(asked.num_tokens, rel=0.1, abs=100)


def test_a_cache_finds_a_beginning_and_forgets_the_end_first() -> None:
    cache = PrefixCache(3)
    cache.keep([("a", 0), ("a", 1)])
    assert cache.hit([("a", 0), ("a", 1), ("a", 2)]) == 2 * BLOCK_TOKENS
    assert cache.hit([("b", 0), ("a", 0)]) == 0
    cache.keep([("b", 0), ("b", 1)])
    assert cache.hit([("a", 0), ("a", 1)]) == BLOCK_TOKENS


def test_every_request_is_served_and_no_load_is_left(trace: list[Asked]) -> None:
    pool = Pool(by_chance, 3, random.Random(1).random)
    assert len(pool.serve(trace)) == len(trace)
    assert [engine.load.outstanding_tokens for role in Role for engine in pool.engines[role]] == [0] * 6


def test_affinity_finds_more_than_chance_and_no_more_than_the_oracle(trace: list[Asked]) -> None:
    rows = [measure(trace, policy, 4, 1, is_one_broken=False) for policy in (by_chance, affinity)]
    oracle = oracle_hits(trace, 4) / sum(one.num_tokens for one in trace)
    assert rows[0].prefill_hit + 0.1 < rows[1].prefill_hit <= oracle


def test_an_engine_that_is_broken_is_tried_and_serves_nothing(trace: list[Asked]) -> None:
    pool = Pool(by_chance, 3, random.Random(1).random, is_one_broken=True)
    assert len(pool.serve(trace)) == len(trace)
    assert pool.num_failed > 0
    assert [pool.engines[role][0].work_tokens for role in Role] == [0, 0]
