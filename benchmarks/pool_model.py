"""A pool in virtual time: the router's own policy, loads and breakers over engines that are a cache and a queue.

    request --> decode's cache --missing--> prefill: one prompt after the other, each for what its cache lacks
                     |                                                     |
                     +--- answer, at its own pace, many at a time <--------+

As for the router's legs, the load of a prefill engine is the missing tokens, and that of decode is prompt and answer.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

from benchmarks.traces import BLOCK_TOKENS, Asked, Block

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.breaker import Breaker
from pdcluster_router.core.engines.load import Load
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.engines.placement import Chooser, Policy, usable

PREFILL_TOKENS_PER_S: Final = 20_000.0
ANSWER_TOKEN_S: Final = 0.02
FAILURE_S: Final = 0.005
"""How fast a broken engine answers with an error."""
CACHE_BLOCKS: Final = 6_000
"""Size of one engine's cache: 768,000 tokens."""
_MOST_TRIES: Final = 3


class PrefixCache:
    """Blocks in the order of their last use."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def hit(self, blocks: Sequence[Block]) -> int:
        """Number of tokens in the longest beginning of ``blocks`` that is in the cache."""
        num = 0
        for block in blocks:
            if block not in self._blocks:
                break
            num += 1
        return num * BLOCK_TOKENS

    def keep(self, blocks: Sequence[Block]) -> None:
        """Keeps the last block first, as vLLM frees them: a prompt's beginning stays longer than its end."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


@dataclass(eq=False)
class ModelEngine:
    """One engine of a role."""

    url: str
    role: Role
    is_broken: bool = False
    load: Load = field(default_factory=Load)
    breaker: Breaker = field(default_factory=Breaker)
    cache: PrefixCache = field(default_factory=lambda: PrefixCache(CACHE_BLOCKS))
    num_running: int = 0
    """Requests that it has: a prefill engine until prefill is done, a decode engine until the answer's end."""
    free_at: float = 0.0
    work_tokens: int = 0
    revision: str = ""
    state: EngineState = EngineState.SERVING
    is_healthy: bool = True


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered. Hits in tokens."""

    asked: Asked
    prefill_hit: int
    decode_hit: int
    wait_s: float


class Router(Protocol):
    """Chooses one of the engines that may get a request."""

    def __call__(
        self, role: Role, asked: Asked, engines: Sequence[ModelEngine], *, now: float, chance: Callable[[], float]
    ) -> ModelEngine: ...


class OurRouter:
    """One of our policies. It makes a new chooser when the engines have changed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._choosers: dict[Role, tuple[Sequence[ModelEngine], Chooser[ModelEngine]]] = {}

    def __call__(
        self, role: Role, asked: Asked, engines: Sequence[ModelEngine], *, now: float, chance: Callable[[], float]
    ) -> ModelEngine:
        known = self._choosers.get(role)
        if known is None or known[0] != engines:
            known = self._choosers[role] = (engines, self._policy(engines))
        return known[1](asked.request, now=now, chance=chance)


class Pool:
    """One router and its engines."""

    def __init__(
        self, router: Router, num_engines: int, chance: Callable[[], float], *, is_one_broken: bool = False
    ) -> None:
        self._router = router
        self._chance = chance
        self.engines = {
            role: [
                ModelEngine(f"http://10.{number}.0.{index}:8000", role, is_one_broken and index == 0)
                for index in range(num_engines)
            ]
            for number, role in enumerate(Role)
        }
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self.num_failed = 0
        self._served: list[Served] = []

    @property
    def prefill_balance(self) -> float:
        return self._balance(Role.PREFILL)

    @property
    def decode_balance(self) -> float:
        return self._balance(Role.DECODE)

    def serve(self, trace: Sequence[Asked]) -> list[Served]:
        for asked in trace:
            self._at(asked.at, lambda now, asked=asked: self._begin(asked, now))  # type: ignore[misc]  # a lambda's default has no type
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        return self._served

    def _begin(self, asked: Asked, now: float) -> None:
        num_tokens = asked.request.body.estimated_prompt_tokens + asked.num_answer_blocks * BLOCK_TOKENS
        decode, delay_s = self._placed(Role.DECODE, asked, num_tokens, now)
        decode_hit = decode.cache.hit(asked.blocks)
        num_missing = asked.num_tokens - decode_hit
        prefill, more_s = self._placed(Role.PREFILL, asked, num_missing, now + delay_s)
        prefill_hit = prefill.cache.hit(asked.blocks)
        began_at = max(now + delay_s + more_s, prefill.free_at)
        num_computed = max(BLOCK_TOKENS, asked.num_tokens - max(prefill_hit, 0)) if num_missing else 0
        prefill.free_at = done_at = began_at + num_computed / PREFILL_TOKENS_PER_S
        prefill.work_tokens += num_computed
        prefill.cache.keep(asked.blocks)
        decode.work_tokens += num_tokens
        self._served.append(Served(asked, prefill_hit, decode_hit, done_at - now))
        self._at(done_at, lambda _: self._ended(prefill, num_missing))
        ends_at = done_at + asked.num_answer_blocks * BLOCK_TOKENS * ANSWER_TOKEN_S
        decode.cache.keep(asked.blocks)
        self._at(ends_at, lambda _: self._answered(decode, asked, num_tokens))

    def _placed(self, role: Role, asked: Asked, num_tokens: int, now: float) -> tuple[ModelEngine, float]:
        """The engine that takes the request, and the seconds lost at engines that failed it."""
        tried: list[ModelEngine] = []
        while True:
            engine = self._choose(role, asked, tried, now)
            engine.load.outstanding_tokens += num_tokens
            engine.load.placed_at = now
            engine.breaker.take(now=now)
            if not engine.is_broken or len(tried) == _MOST_TRIES:
                engine.breaker.began(engine.breaker.era)
                engine.num_running += 1
                return engine, FAILURE_S * len(tried)
            engine.load.outstanding_tokens -= num_tokens
            engine.load.add_failed(num_tokens, now=now)
            engine.breaker.failed(engine.breaker.era, now=now)
            self.num_failed += 1
            tried.append(engine)

    def _choose(self, role: Role, asked: Asked, tried: Sequence[ModelEngine], now: float) -> ModelEngine:
        for engine in self.engines[role]:
            engine.breaker.wake(now=now)
        engines = usable([engine for engine in self.engines[role] if engine not in tried])
        return self._router(role, asked, engines, now=now, chance=self._chance)

    def _ended(self, prefill: ModelEngine, num_tokens: int) -> None:
        prefill.num_running -= 1
        prefill.load.outstanding_tokens -= num_tokens
        prefill.breaker.succeeded(prefill.breaker.era)

    def _answered(self, decode: ModelEngine, asked: Asked, num_tokens: int) -> None:
        decode.num_running -= 1
        decode.load.outstanding_tokens -= num_tokens
        decode.breaker.succeeded(decode.breaker.era)
        decode.cache.keep(asked.with_answer)

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def _balance(self, role: Role) -> float:
        """Work of the busiest engine over the mean work; broken engines do not count."""
        work = [engine.work_tokens for engine in self.engines[role] if not engine.is_broken]
        return max(work) * len(work) / max(1, sum(work))


def oracle_hits(trace: Sequence[Asked], num_engines: int) -> int:
    """Prompt tokens that one engine with the memory of all would find cached. It keeps prompts, and no answers."""
    cache = PrefixCache(CACHE_BLOCKS * num_engines)
    num_hit = 0
    for asked in trace:
        num_hit += cache.hit(asked.blocks)
        cache.keep(asked.blocks)
    return num_hit
