"""The comparison of policies: its traces, its caches, and that its figures can be told apart."""

from __future__ import annotations

import random

import pytest
from benchmarks.peer_policies import PEERS
from benchmarks.policies import by_chance, measure
from benchmarks.pool_model import ModelEngine, OurRouter, Pool, PrefixCache, oracle_hits
from benchmarks.traces import AGENTS, BLOCK_TOKENS, CHATS, Asked, made

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.policies.affinity import affinity

HASH = "vllm-router consistent-hash"


@pytest.fixture(scope="module")
def trace() -> list[Asked]:
    return made(random.Random(1), [(CHATS, 60)])


def test_a_turn_begins_with_what_the_one_before_has_left_and_its_body_is_as_long_as_its_blocks(
    trace: list[Asked],
) -> None:
    last: dict[str, Asked] = {}
    for asked in trace:
        if before := last.get(asked.session):
            assert asked.blocks[: len(before.with_answer)] == before.with_answer
        last[asked.session] = asked
        assert asked.request.body.estimated_prompt_tokens == pytest.approx(asked.num_tokens, rel=0.1, abs=100)
    assert len(last) < len(trace)
    assert [(one.at, one.blocks) for one in made(random.Random(1), [(CHATS, 60)])] == [
        (one.at, one.blocks) for one in trace
    ]


def test_a_cache_finds_a_beginning_and_forgets_the_end_first() -> None:
    cache = PrefixCache(3)
    cache.keep([("a", 0), ("a", 1)])
    assert cache.hit([("a", 0), ("a", 1), ("a", 2)]) == 2 * BLOCK_TOKENS
    assert cache.hit([("b", 0), ("a", 0)]) == 0
    cache.keep([("b", 0), ("b", 1)])
    assert cache.hit([("a", 0), ("a", 1)]) == BLOCK_TOKENS


def test_affinity_finds_more_than_chance_and_no_more_than_the_oracle(trace: list[Asked]) -> None:
    rows = [measure(trace, OurRouter(policy), 4, 1, is_one_broken=False) for policy in (by_chance, affinity)]
    oracle = oracle_hits(trace, 4) / sum(one.num_tokens for one in trace)
    assert rows[0].prefill_hit + 0.1 < rows[1].prefill_hit <= oracle


@pytest.mark.parametrize("name", ["ours", *PEERS])
def test_choices_serve_every_request_leave_no_load_and_give_a_broken_engine_no_work(
    trace: list[Asked], name: str
) -> None:
    router = OurRouter(by_chance) if name == "ours" else PEERS[name]()
    pool = Pool(router, 3, random.Random(1).random, is_one_broken=name == "ours")
    assert len(pool.serve(trace)) == len(trace)
    engines = [engine for role in Role for engine in pool.engines[role]]
    assert {(engine.load.outstanding_tokens, engine.num_running) for engine in engines} == {(0, 0)}
    assert (pool.num_failed > 0) is (name == "ours")
    assert not any(engine.work_tokens for engine in engines if engine.is_broken)


def first_choices(name: str, trace: list[Asked], busy: int = 0) -> list[str]:
    """Of two requests of one conversation and one of another, with the same system prompt; ``busy`` of the first's."""
    router, pool = PEERS[name](), Pool(OurRouter(by_chance), 4, random.Random(1).random)
    engines = pool.engines[Role.PREFILL]
    first = next(one for one in trace if len(one.blocks) < 12)
    turns = [one for one in trace if one.session == first.session][:2]
    other = next(one for one in trace if one.session != first.session and one.blocks[0] == first.blocks[0])
    chosen = []
    for asked in (*turns, other):
        engine = router(Role.PREFILL, asked, engines, now=asked.at, chance=lambda: 0.99)
        engine.cache.keep(asked.blocks)
        engine.num_running = busy
        chosen.append(engine.url)
    return chosen


@pytest.mark.parametrize("name", [name for name in PEERS if name != HASH])
def test_peers_that_know_prompts_bring_a_conversation_back_but_not_to_an_engine_that_has_far_more(
    trace: list[Asked], name: str
) -> None:
    first, second, _ = first_choices(name, trace)
    assert first == second
    if most := {"sglang cache-aware": 64, "aibrix": 16}.get(name):
        assert len(set(first_choices(name, trace, busy=most))) == 1
        assert len(set(first_choices(name, trace, busy=most + 1))) > 1


def test_a_ring_goes_by_the_named_session_and_moves_only_those_of_the_engine_that_left() -> None:
    agents = made(random.Random(1), [(AGENTS, 40)])
    engines = Pool(OurRouter(by_chance), 4, random.Random(1).random).engines[Role.DECODE]
    router = PEERS[HASH]()

    def homes(there: list[ModelEngine]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for one in agents:
            url = router(Role.DECODE, one, there, now=0, chance=random.random).url
            found.setdefault(one.session, set()).add(url)
        return found

    before, after = homes(engines), homes(engines[1:])
    assert {len(urls) for urls in before.values()} == {1}
    assert all(after[session] == urls for session, urls in before.items() if urls != {engines[0].url})
    assert set.union(*before.values()) == {engine.url for engine in engines}
