"""The comparison of policies: its traces, its caches, and that its figures can be told apart."""

from __future__ import annotations

import random

import pytest
from benchmarks.peer_policies import PEERS, named_session
from benchmarks.policies import by_chance, measure
from benchmarks.pool_model import ModelEngine, OurRouter, Pool, PrefixCache, oracle_hits
from benchmarks.traces import AGENTS, BLOCK_TOKENS, CHATS, Asked, made

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.policies.affinity import affinity


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
    pool = Pool(OurRouter(by_chance), 3, random.Random(1).random)
    assert len(pool.serve(trace)) == len(trace)
    assert [engine.load.outstanding_tokens for role in Role for engine in pool.engines[role]] == [0] * 6


def test_affinity_finds_more_than_chance_and_no_more_than_the_oracle(trace: list[Asked]) -> None:
    rows = [measure(trace, OurRouter(policy), 4, 1, is_one_broken=False) for policy in (by_chance, affinity)]
    oracle = oracle_hits(trace, 4) / sum(one.num_tokens for one in trace)
    assert rows[0].prefill_hit + 0.1 < rows[1].prefill_hit <= oracle


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_choices_serve_every_request_and_leave_no_load(trace: list[Asked], name: str) -> None:
    pool = Pool(PEERS[name](), 3, random.Random(1).random)
    assert len(pool.serve(trace)) == len(trace)
    engines = [engine for role in Role for engine in pool.engines[role]]
    assert {(engine.load.outstanding_tokens, engine.num_running) for engine in engines} == {(0, 0)}


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


@pytest.mark.parametrize("name", [name for name in PEERS if name != "vllm-router consistent-hash"])
def test_peers_that_know_prompts_bring_a_conversation_back(trace: list[Asked], name: str) -> None:
    first, second, _ = first_choices(name, trace)
    assert first == second


@pytest.mark.parametrize(("name", "most"), [("sglang cache-aware", 64), ("aibrix", 16)])
def test_an_engine_that_has_far_more_requests_than_another_is_given_up(
    trace: list[Asked], name: str, most: int
) -> None:
    assert len(set(first_choices(name, trace, busy=most))) == 1
    assert len(set(first_choices(name, trace, busy=most + 1))) > 1


def test_a_named_session_is_read_from_its_header() -> None:
    (one, *_) = made(random.Random(1), [(AGENTS, 1)])
    assert named_session(one) == b"session-0.0"
    assert named_session(made(random.Random(1), [(CHATS, 1)])[0]) == b""


def test_a_ring_moves_only_the_sessions_of_the_engine_that_left() -> None:
    agents = made(random.Random(1), [(AGENTS, 40)])
    engines = Pool(OurRouter(by_chance), 4, random.Random(1).random).engines[Role.DECODE]
    router = PEERS["vllm-router consistent-hash"]()

    def homes(there: list[ModelEngine]) -> dict[str, str]:
        return {one.session: router(Role.DECODE, one, there, now=0, chance=random.random).url for one in agents}

    before, after = homes(engines), homes(engines[1:])
    assert all(after[session] == url for session, url in before.items() if url != engines[0].url)
    assert set(before.values()) == {engine.url for engine in engines}


def test_an_engine_that_is_broken_is_tried_and_serves_nothing(trace: list[Asked]) -> None:
    pool = Pool(OurRouter(by_chance), 3, random.Random(1).random, is_one_broken=True)
    assert len(pool.serve(trace)) == len(trace)
    assert pool.num_failed > 0
    assert [pool.engines[role][0].work_tokens for role in Role] == [0, 0]
