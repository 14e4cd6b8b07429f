"""Measures the cost of choosing an engine from 2, 16 and 256 engines, side by side in one run.

    .venv/bin/python -m benchmarks.placement

Microseconds of processor time for one choice, by policy: *well* among engines that answer, *failed* among engines that
have all failed a request lately, so that each load must be worked out anew, *first* when the engines have just changed,
so that affinity knows no homes. Then the cost that affinity has once for each request: to find out its conversation.
The cost must not grow with the engines.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.load import Load
from pdcluster_router.core.engines.placement import Chooser, RequestFacts
from pdcluster_router.core.engines.policies.conversation import number_of
from pdcluster_router.services import POLICIES

NUM_ENGINES: Final = (2, 16, 256)
_NUM_CHOICES: Final = 10_000
_NUM_CONVERSATIONS: Final = 500
_HEADERS: Final = b"content-type: application/json\r\naccept: */*\r\nuser-agent: OpenAI/Python 2.8\r\n" + b"".join(
    b"x-stainless-fact-%d: as the SDKs of OpenAI and Anthropic send them\r\n" % number for number in range(12)
)
_SESSION: Final = b"x-session-id: 3f1c2f0e-8d0f-4b5a-9f43-0c8f3f6a9c11\r\n"


@dataclass(slots=True)
class Engine:
    url: str
    load: Load = field(default_factory=Load)


def cost_us(work: Callable[[], object], times: int = _NUM_CHOICES, rounds: int = 5) -> float:
    """Microseconds of processor time for one call of ``work``: the least of the rounds."""
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(times):
            work()
        seconds.append((time.process_time() - began) / times)
    return min(seconds) * 1e6


def choice(choose: Chooser[Engine], requests: list[RequestFacts]) -> Callable[[], Engine]:
    """A function that makes one choice; each call takes the next request."""
    following = cycle(requests)
    return lambda: choose(next(following), now=1.0, chance=random.random)


def requests() -> list[RequestFacts]:
    """One request for each of many conversations, whose numbers are known already."""
    body = parse_body(b"{}")
    return [RequestFacts(b"", b"", body, "", [number * 7919]) for number in range(_NUM_CONVERSATIONS)]


def show_choices() -> None:
    print("policy        engines  well us  failed us  first us")
    for name, policy in POLICIES.items():
        for number in NUM_ENGINES:
            engines = [Engine(f"http://10.0.0.{index}:8000", Load(index * 7 % 13, index)) for index in range(number)]
            well = cost_us(choice(policy(engines), requests()))
            first = cost_us(choice(policy(engines), requests()), times=_NUM_CONVERSATIONS, rounds=1)
            for engine in engines:
                engine.load.add_failed(100, now=0.0)
            failed = cost_us(choice(policy(engines), requests()))
            print(f"{name.value:<13} {number:>7} {well:>8.2f} {failed:>10.2f} {first:>9.2f}")


def chat(system_bytes: int, user_bytes: int) -> bytes:
    messages = [("system", system_bytes), ("user", user_bytes), ("assistant", 3000)]
    return json.dumps({"messages": [{"role": role, "content": "x" * size} for role, size in messages]}).encode()


def show_numbers() -> None:
    rows = {
        "its session is named": (_HEADERS + _SESSION, chat(20_000, 500)),
        "20 KB of system prompt": (_HEADERS, chat(20_000, 500)),
        "and 8 KB of the user": (_HEADERS, chat(20_000, 8_000)),
        "200 KB of system prompt": (_HEADERS, chat(200_000, 500)),
        "a prompt of 9 KB": (_HEADERS, json.dumps({"prompt": "x" * 9_000}).encode()),
    }
    print("\nwhich conversation        us")
    for name, (headers, body) in rows.items():
        request = RequestFacts(b"", headers, parse_body(body), "")
        print(f"{name:<23} {cost_us(lambda request=request: number_of(request), 2_000):>5.2f}")  # type: ignore[misc]  # a lambda's default has no type


if __name__ == "__main__":
    show_choices()
    show_numbers()
