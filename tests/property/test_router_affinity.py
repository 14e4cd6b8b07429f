"""Laws of affinity: for any conversation, any pool and any loads."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.load import Load
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.core.engines.policies.affinity import MOST_LOAD, NUM_HOMES, PART_OF_PROMPT, affinity
from pdcluster_router.core.engines.policies.conversation import number_of

THOROUGH = settings(max_examples=drawn(200), deadline=None)
BODY = parse_body(b"{}")
URLS = st.lists(st.integers(0, 99).map("http://10.0.0.{}:8000".format), min_size=1, max_size=12, unique=True)
NUMBERS = st.integers(0, 2**32 - 1)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=80)}
)


@dataclass(eq=False)
class Engine:
    url: str
    load: Load = field(default_factory=Load)


def home_of(urls: list[str], number: int) -> str:
    engines = [Engine(url) for url in urls]
    return affinity(engines)(RequestFacts(b"", b"", BODY, "", [number]), now=0.0, chance=lambda: 0.0).url


@THOROUGH
@given(urls=URLS, number=NUMBERS, shuffle=st.randoms())
def test_every_router_chooses_the_same_in_whatever_order_it_lists_its_engines(
    urls: list[str], number: int, shuffle: random.Random
) -> None:
    others = list(urls)
    shuffle.shuffle(others)
    assert home_of(others, number) == home_of(urls, number)


@THOROUGH
@given(urls=URLS, number=NUMBERS, index=st.integers(0, 11))
def test_an_engine_that_goes_or_comes_moves_its_own_conversations_alone(
    urls: list[str], number: int, index: int
) -> None:
    gone = urls[index % len(urls)]
    left = [url for url in urls if url != gone]
    home = home_of(urls, number)
    assert not left or home_of(left, number) == home or home == gone


@THOROUGH
@given(
    loads=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    numbers=st.lists(NUMBERS, min_size=1, max_size=20),
)
def test_who_gets_a_request_is_not_full_unless_all_its_homes_are(loads: list[int], numbers: list[int]) -> None:
    engines = [Engine(f"http://10.0.0.{index}:8000", Load(tokens)) for index, tokens in enumerate(loads)]
    most = MOST_LOAD * sum(loads) / len(loads) + PART_OF_PROMPT * BODY.estimated_prompt_tokens
    choose = affinity(engines)
    for number in numbers:
        engine = choose(RequestFacts(b"", b"", BODY, "", [number]), now=0.0, chance=lambda: 0.0)
        assert engine in engines
        num_full = sum(one.load.outstanding_tokens > most for one in engines)
        assert engine.load.outstanding_tokens <= most or num_full >= min(NUM_HOMES, len(engines))


@THOROUGH
@given(
    system=st.text(max_size=2000),
    first=st.text(max_size=6000),
    rest=st.lists(MESSAGE, max_size=5),
    is_ascii=st.booleans(),
    order=st.permutations(["role", "content"]),
)
def test_whatever_is_said_a_conversation_keeps_its_number(
    system: str, first: str, rest: list[dict[str, str]], is_ascii: bool, order: list[str]
) -> None:
    begin = [{"role": "system", "content": system + "." * 1024}, {"role": "user", "content": first}]
    turns = []
    for messages in (begin, begin + rest):
        ordered = [{key: message[key] for key in order} for message in messages]
        raw = json.dumps({"messages": ordered, "max_tokens": 5}, ensure_ascii=is_ascii).encode("utf-8", "replace")
        turns.append(number_of(RequestFacts(b"", b"", parse_body(raw), "")))
    assert turns[0] == turns[1] is not None


@pytest.mark.parametrize("number_of_engines", [2, 5, 12])
def test_a_bound_holds_while_one_conversation_alone_sends_everything(number_of_engines: int) -> None:
    """A key that a gateway gives to all: it spreads over the engines instead of drowning one."""
    engines = [Engine(f"http://10.0.0.{index}:8000") for index in range(number_of_engines)]
    choose, chance = affinity(engines), random.Random(7).random
    for _ in range(100 * number_of_engines):
        choose(RequestFacts(b"", b"", BODY, "", [1]), now=0.0, chance=chance).load.outstanding_tokens += 100
    loads = [engine.load.outstanding_tokens for engine in engines]
    assert max(loads) <= MOST_LOAD * sum(loads) / len(loads) + 200
