"""The policy of affinity: a conversation comes back to its engine, unless that one is full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest

from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.load import SLOW_START_S, Load
from pdcluster_router.core.engines.placement import Chooser, Home, RequestFacts, new_tally
from pdcluster_router.core.engines.policies.affinity import NUM_BUCKETS, NUM_HOMES, PART_OF_PROMPT, affinity

BODY = parse_body(b'{"prompt":"' + b"x" * 400 + b'"}')
"""100 tokens and some."""


@dataclass(eq=False)
class Engine:
    url: str
    load: Load = field(default_factory=Load)


def engines_of(number: int) -> list[Engine]:
    return [Engine(f"http://10.0.0.{index}:8000") for index in range(number)]


def request(number: int | None) -> RequestFacts:
    return RequestFacts(b"", b"", BODY, "", [number])


def chosen(choose: Chooser[Engine], number: int | None, *, now: float = 0.0) -> Engine:
    return choose(request(number), now=now, chance=lambda: 0.5)


def test_what_has_no_number_goes_where_there_is_the_least_to_do() -> None:
    engines = engines_of(3)
    for engine, tokens in zip(engines, (5, 3, 4), strict=True):
        engine.load.outstanding_tokens = tokens
    assert chosen(affinity(engines), None) is engines[1]


def test_the_number_is_worked_out_once_for_both_legs() -> None:
    asked = RequestFacts(b"", b"x-session-id: s\r\n", BODY, "")
    decode = affinity(engines_of(4))(asked, now=0.0, chance=lambda: 0.5)
    first = list(asked.notes)
    assert first != []
    prefill = affinity(engines_of(4))(asked, now=0.0, chance=lambda: 0.5)
    assert (asked.notes, prefill.url) == (first, decode.url)


def test_homes_are_even() -> None:
    choose = affinity(engines_of(16))
    got = Counter(chosen(choose, bucket).url for bucket in range(NUM_BUCKETS))
    assert len(got) == 16
    assert max(got.values()) < 1.1 * NUM_BUCKETS / 16


def test_a_full_engine_passes_on_to_the_one_that_would_have_its_conversations_without_it() -> None:
    engines = engines_of(5)
    choose = affinity(engines)
    home = chosen(choose, 7)
    without = chosen(affinity([engine for engine in engines if engine is not home]), 7)
    home.load.outstanding_tokens = 10_000
    assert chosen(choose, 7) is without
    home.load.outstanding_tokens = 0
    assert chosen(choose, 7) is home


def test_an_engine_is_full_above_the_mean_and_a_quarter_and_a_part_of_this_prompt() -> None:
    engines = engines_of(4)
    choose = affinity(engines)
    home = chosen(choose, 3)
    for engine in engines:
        engine.load.outstanding_tokens = 1000
    extra = PART_OF_PROMPT * BODY.estimated_prompt_tokens
    most = next(most for most in range(1000, 3000) if most > 1.25 * (3000 + most) / 4 + extra)
    for outstanding, is_home in ((most - 1, True), (most, False)):
        home.load.outstanding_tokens = outstanding
        assert (chosen(choose, 3) is home) is is_home


def test_an_engine_with_just_so_much_to_do_is_not_full() -> None:
    body = parse_body(b'{"prompt":"' + b"x" * 408 + b'"}')
    num_thirds, rest = divmod(body.estimated_prompt_tokens, 3)
    assert rest == 0
    for number in range(20):
        choose = affinity(engines_of(2))
        asked = RequestFacts(b"", b"", body, "", [number])
        home = choose(asked, now=0.0, chance=lambda: 0.5)
        for more, is_home in ((0, True), (1, False)):
            home.load.outstanding_tokens = 4 * num_thirds + more  # 1.25 times half of it, and half of this prompt.
            assert (choose(asked, now=0.0, chance=lambda: 0.5) is home) is is_home


def test_when_all_homes_are_full_the_load_decides() -> None:
    engines = engines_of(64)
    choose = affinity(engines)
    for _ in range(NUM_HOMES):
        chosen(choose, 9).load.outstanding_tokens = 1_000_000
        choose = affinity(engines)
    assert chosen(choose, 9).load.outstanding_tokens == 0


def test_an_engine_that_is_back_gets_its_conversations_slowly() -> None:
    engines = engines_of(2)
    choose = affinity(engines)
    home = chosen(choose, 1)
    for engine in engines:
        engine.load.outstanding_tokens = 1000
    home.load.start_slowly(now=0.0)
    assert chosen(choose, 1, now=0.0) is not home
    assert chosen(choose, 1, now=SLOW_START_S) is home


PROGRAM = """
from dataclasses import dataclass, field
from pdcluster_router.core.engines.load import Load
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.core.engines.policies.affinity import affinity
from pdcluster_router.core.apis.rewrite import parse_body
@dataclass
class Engine:
    url: str
    load: Load = field(default_factory=Load)
choose = affinity([Engine(f"http://10.0.0.{index}:8000") for index in range(7)])
body = parse_body(b"{}")
for session in range(40):
    asked = RequestFacts(b"", b"x-session-id: %d\\r\\n" % session, body, "")
    print(choose(asked, now=0.0, chance=lambda: 0.5).url)
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_chooses_the_same_engines(seed: str) -> None:
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
    choose = affinity(engines_of(7))
    asked = [RequestFacts(b"", b"x-session-id: %d\r\n" % session, BODY, "") for session in range(40)]
    assert said.decode().split() == [choose(one, now=0.0, chance=lambda: 0.5).url for one in asked]


def test_each_choice_is_counted_by_what_became_of_the_conversations_home() -> None:
    engines, tally = engines_of(8), new_tally()
    choose = affinity(engines, tally)
    homes: list[Engine] = []
    for _ in range(NUM_HOMES + 1):
        homes.append(chosen(choose, 7))
        homes[-1].load.outstanding_tokens = 1_000_000
    chosen(choose, None)
    assert len(set(homes[:NUM_HOMES])) == NUM_HOMES
    assert tally == {Home.FIRST: 1, Home.NEXT: NUM_HOMES - 1, Home.FULL: 1, Home.NONE: 1}
