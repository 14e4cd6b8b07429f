"""Adapters with affinity: how often an engine has a request's adapter ready, and that no engine is overloaded for it.

A trace is played on engines that keep the ``SLOTS`` adapters that they used last, as vLLM's ``--max-loras`` does. The
oracle shares state: it knows which engines have an adapter ready, and chooses the least loaded of those that are not
full. No router can know that.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.load import Load
from pdcluster_router.core.engines.placement import Home, Policy, RequestFacts, new_tally
from pdcluster_router.core.engines.policies.affinity import MOST_LOAD, NUM_HOMES, PART_OF_PROMPT, affinity
from pdcluster_router.core.engines.policies.conversation import number_of
from pdcluster_router.core.engines.policies.least_tokens import least_tokens

NUM_ENGINES, NUM_ADAPTERS, SLOTS, NUM_RUNNING, NUM_REQUESTS = 8, 64, 12, 48, 6000
SHORT: Final = parse_body(b'{"model":"a","prompt":"' + b"x" * 800 + b'"}')
"""Too short for an opening."""


@dataclass(eq=False)
class Engine:
    url: str
    load: Load = field(default_factory=Load)
    ready: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def use(self, adapter: int) -> bool:
        """Whether the adapter was ready. It is the newest one from now on."""
        was_ready = adapter in self.ready
        self.ready[adapter] = None
        self.ready.move_to_end(adapter)
        if len(self.ready) > SLOTS:
            self.ready.popitem(last=False)
        return was_ready


Choose = Callable[[RequestFacts], Engine]


def facts_of(adapter: int) -> RequestFacts:
    return RequestFacts(b"", b"", SHORT, "", [], crc32(b"adapter-%d" % adapter))


def trace_of(seed: int) -> Iterator[tuple[int, int]]:
    """An adapter and a number of tokens for each request: few adapters are in much use, and many in little."""
    chance = random.Random(seed)
    weights = [1 / rank for rank in range(1, NUM_ADAPTERS + 1)]
    for adapter in chance.choices(range(NUM_ADAPTERS), weights, k=NUM_REQUESTS):
        yield adapter, chance.randint(200, 600)


def played(seed: int, chooser_of: Callable[[list[Engine]], Choose]) -> tuple[float, float]:
    """The part of requests whose adapter was ready; and the highest load of an engine, in mean loads, on average."""
    engines = [Engine(f"http://10.0.0.{index}:8000") for index in range(NUM_ENGINES)]
    choose = chooser_of(engines)
    running: deque[tuple[Engine, int]] = deque()
    num_ready, peaks = 0, 0.0
    for adapter, tokens in trace_of(seed):
        engine = choose(facts_of(adapter))
        num_ready += engine.use(adapter)
        engine.load.outstanding_tokens += tokens
        running.append((engine, tokens))
        if len(running) > NUM_RUNNING:
            ended, freed = running.popleft()
            ended.load.outstanding_tokens -= freed
        loads = [one.load.outstanding_tokens for one in engines]
        peaks += max(loads) / (sum(loads) / NUM_ENGINES)
    return num_ready / NUM_REQUESTS, peaks / NUM_REQUESTS


def by(policy: Policy) -> Callable[[list[Engine]], Choose]:
    def chooser_of(engines: list[Engine]) -> Choose:
        choose, chance = policy(engines), random.Random(0)
        return lambda request: choose(request, now=0.0, chance=chance.random)

    return chooser_of


def oracle(engines: list[Engine]) -> Choose:
    names = {crc32(b"adapter-%d" % adapter): adapter for adapter in range(NUM_ADAPTERS)}

    def choose(request: RequestFacts) -> Engine:
        mean = sum(engine.load.tokens(now=0.0) for engine in engines) / len(engines)
        most = MOST_LOAD * mean + PART_OF_PROMPT * request.body.estimated_prompt_tokens
        fit = [one for one in engines if names[request.adapter or 0] in one.ready and one.load.tokens(now=0.0) <= most]
        return min(fit or engines, key=lambda engine: engine.load.tokens(now=0.0))

    return choose


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_adapters_are_ready_nearly_as_often_as_an_oracle_could_have_it(seed: int) -> None:
    (ready, peak), (best, _), (blind, blind_peak) = (
        played(seed, chooser_of) for chooser_of in (by(affinity), oracle, by(least_tokens))
    )
    assert best >= ready >= 0.9 * best
    assert ready > 1.5 * blind
    assert peak < blind_peak + 0.5


@settings(max_examples=drawn(200), deadline=None)
@given(
    loads=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    adapters=st.lists(st.integers(0, NUM_ADAPTERS), min_size=1, max_size=20),
    shuffle=st.randoms(),
)
def test_every_router_sends_an_adapter_to_the_same_engine_and_to_no_full_one_unless_its_homes_are(
    loads: list[int], adapters: list[int], shuffle: random.Random
) -> None:
    engines = [Engine(f"http://10.0.0.{index}:8000", Load(tokens)) for index, tokens in enumerate(loads)]
    others = list(engines)
    shuffle.shuffle(others)
    most = MOST_LOAD * sum(loads) / len(loads) + PART_OF_PROMPT * SHORT.estimated_prompt_tokens
    tally = new_tally()
    choose, choose_too = affinity(engines, tally), affinity(others)
    fit = [engine for engine in engines if engine.load.tokens(now=0.0) <= most]
    for adapter in adapters:
        num_full = tally[Home.FULL]
        engine = choose(facts_of(adapter), now=0.0, chance=lambda: 0.0)
        if tally[Home.FULL] > num_full:
            assert len(fit) <= len(engines) - min(NUM_HOMES, len(engines))
            continue
        assert engine in fit
        assert choose_too(facts_of(adapter), now=0.0, chance=lambda: 0.0) is engine


def test_an_adapter_that_everybody_asks_for_loads_no_engine_beyond_the_bound() -> None:
    engines = [Engine(f"http://10.0.0.{index}:8000") for index in range(NUM_ENGINES)]
    choose, got = by(affinity)(engines), Counter[str]()
    for _ in range(400):
        engine = choose(facts_of(7))
        engine.load.outstanding_tokens += 300
        got[engine.url] += 1
    mean = 300 * 400 / NUM_ENGINES
    assert max(one.load.outstanding_tokens for one in engines) <= MOST_LOAD * mean + 2 * 300
    assert len(got) == NUM_ENGINES


@pytest.mark.parametrize("lines", [b"x-session-id: s\r\n", b""])
def test_a_conversation_stays_at_home_whatever_its_adapter(lines: bytes) -> None:
    body = SHORT if lines else parse_body(b'{"prompt":"' + b"x" * 2000 + b'"}')
    numbers = {number_of(RequestFacts(b"", lines, body, "", [], adapter)) for adapter in (None, 1, 2)}
    assert len(numbers) == 1
    assert None not in numbers


def test_a_short_request_for_a_base_model_has_no_number() -> None:
    assert number_of(RequestFacts(b"", b"", SHORT, "", [], None)) is None
