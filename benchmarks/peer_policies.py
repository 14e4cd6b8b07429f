"""The policies of other routers, by their sources and with their defaults, for the comparison on traces.

Each policy is written anew after its source. It compares the trace's blocks instead of text or tokens, so it knows a
prompt exactly. Some things are left out because ``pool_model.py`` does not have them: several models, ranks, memory of
hosts, and that a router's figures of an engine are up to a second old.

===============  ==============================================================================================
cache-aware      sglang-router 0.3.2 and vllm-router 0.1.17 for both roles, ``cache_aware.rs``: a tree of the text
                 that was sent; threshold 0.3, balance 64 and 1.5. vllm-router also remembers named sessions.
consistent-hash  vllm-router 0.1.17, ``consistent_hash.rs``: a ring with 160 points an engine, by the session's
                 header, else by the whole request.
endpoint-picker  The Inference Extension's endpoint picker, which llm-d uses, ``prefix/plugin.go``: of the prefix 3, of
                 the queue 2, of memory in use 2; at most 256 blocks of 16 tokens of a prompt are compared.
aibrix           ``pd_disaggregation.go``: the engine with the fewest requests if another has over 16 more. Else for
                 prefill the least sum of requests and ten times the missing share of the prefix
                 (``pd/prefill_scorer.go``); for decode the fewest requests (``pd/decode_scorer.go``, without its
                 share of throughput).
dynamo           ``selector/default.rs`` with events of the engines' caches: the fewest blocks to compute (waiting
                 ones included) and blocks in use. For decode blocks in use alone.
===============  ==============================================================================================
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from benchmarks.pool_model import CACHE_BLOCKS, ModelEngine, PrefixCache, Router
from benchmarks.traces import BLOCK_TOKENS, Asked

from pdcluster_protocol.labels import Role

_MATCH_THRESHOLD: Final = 0.3
_BALANCE_MORE: Final = 64
_BALANCE_TIMES: Final = 1.5
_TREE_BLOCKS: Final = (1 << 26) // (4 * BLOCK_TOKENS)
"""Blocks of one engine in a tree of 2^26 characters, four to a token."""
_POINTS: Final = 160
_AIBRIX_SPREAD: Final = 16
_PICKER_BLOCKS: Final = 256 * 16 // BLOCK_TOKENS
_PICKER_MEMORY: Final = 31_250 * 16 // BLOCK_TOKENS
_ENGINE_TOKENS: Final = CACHE_BLOCKS * BLOCK_TOKENS


@dataclass
class Sent:
    """The blocks that a router has sent to each engine, as far as it remembers: the newest ``num_blocks``."""

    num_blocks: int
    of_engine: dict[str, PrefixCache] = field(default_factory=dict)

    def share(self, engine: ModelEngine, asked: Asked, most_blocks: int) -> float:
        """The part of the prompt, or of its first ``most_blocks``, that the engine has been sent."""
        blocks = asked.blocks[:most_blocks]
        cache = self.of_engine.get(engine.url)
        return cache.hit(blocks) / (len(blocks) * BLOCK_TOKENS) if cache and blocks else 0.0

    def add(self, engine: ModelEngine, asked: Asked, most_blocks: int) -> None:
        self.of_engine.setdefault(engine.url, PrefixCache(self.num_blocks)).keep(asked.blocks[:most_blocks])


class CacheAware:
    """The policy of sglang-router, or with ``knows_sessions`` that of vllm-router."""

    def __init__(self, *, knows_sessions: bool) -> None:
        self._sent = {role: Sent(_TREE_BLOCKS) for role in Role}
        self._homes: dict[tuple[Role, bytes], str] = {}
        self._knows_sessions = knows_sessions

    def __call__(
        self, role: Role, asked: Asked, engines: Sequence[ModelEngine], *, now: float, chance: Callable[[], float]
    ) -> ModelEngine:
        engine = self._chosen(role, asked, engines)
        self._sent[role].add(engine, asked, len(asked.blocks))
        if session := self._session(asked):
            self._homes[role, session] = engine.url
        return engine

    def _chosen(self, role: Role, asked: Asked, engines: Sequence[ModelEngine]) -> ModelEngine:
        least = min(engines, key=_running)
        most = max(map(_running, engines))
        if most - least.num_running > _BALANCE_MORE and most > _BALANCE_TIMES * least.num_running:
            return least
        home = self._homes.get((role, self._session(asked)))
        for engine in engines:
            if engine.url == home:
                return engine
        shares = {engine.url: self._sent[role].share(engine, asked, len(asked.blocks)) for engine in engines}
        best = max(engines, key=lambda engine: shares[engine.url])
        return best if shares[best.url] > _MATCH_THRESHOLD else least

    def _session(self, asked: Asked) -> bytes:
        return named_session(asked) if self._knows_sessions else b""


class ConsistentHash:
    """The policy of vllm-router."""

    def __init__(self) -> None:
        self._rings: dict[tuple[str, ...], list[tuple[int, int]]] = {}

    def __call__(
        self, role: Role, asked: Asked, engines: Sequence[ModelEngine], *, now: float, chance: Callable[[], float]
    ) -> ModelEngine:
        urls = tuple(engine.url for engine in engines)
        ring = self._rings.get(urls) or self._rings.setdefault(urls, _ring(urls))
        key = named_session(asked) or repr(asked.blocks).encode()
        return engines[ring[bisect(ring, (crc32(key), -1)) % len(ring)][1]]


def _ring(urls: tuple[str, ...]) -> list[tuple[int, int]]:
    points = ((crc32(f"{url}:{point}".encode()), index) for index, url in enumerate(urls) for point in range(_POINTS))
    return sorted(points)


class EndpointPicker:
    """The policy of the Inference Extension, as in llm-d's guides."""

    def __init__(self) -> None:
        self._sent = {role: Sent(_PICKER_MEMORY) for role in Role}

    def __call__(
        self, role: Role, asked: Asked, engines: Sequence[ModelEngine], *, now: float, chance: Callable[[], float]
    ) -> ModelEngine:
        queues = [max(0, engine.num_running - 1) if role is Role.PREFILL else 0 for engine in engines]
        scores = [
            3 * self._sent[role].share(engine, asked, _PICKER_BLOCKS)
            + 2 * _emptiness(queue, queues)
            + 2 * (1 - engine.load.outstanding_tokens / _ENGINE_TOKENS)
            for engine, queue in zip(engines, queues, strict=True)
        ]
        best = [engine for engine, score in zip(engines, scores, strict=True) if score == max(scores)]
        chosen = best[int(chance() * len(best))]
        self._sent[role].add(chosen, asked, _PICKER_BLOCKS)
        return chosen


def _emptiness(queue: int, queues: Sequence[int]) -> float:
    """1 for the shortest of the queues, 0 for the longest."""
    shortest, longest = min(queues), max(queues)
    return (longest - queue) / (longest - shortest) if longest > shortest else 1.0


class Aibrix:
    """Aibrix's ``prefix_cache`` for prefill, and the fewest requests for decode."""

    def __init__(self) -> None:
        self._sent = Sent(_TREE_BLOCKS)

    def __call__(
        self, role: Role, asked: Asked, engines: Sequence[ModelEngine], *, now: float, chance: Callable[[], float]
    ) -> ModelEngine:
        least = min(engines, key=_running)
        most = max(map(_running, engines))
        if role is Role.DECODE or most - least.num_running > _AIBRIX_SPREAD:
            return self._noted(role, asked, least)
        shares = {engine.url: self._sent.share(engine, asked, len(asked.blocks)) for engine in engines}
        best = min(engines, key=lambda engine: 10 * (1 - shares[engine.url]) + engine.num_running / max(1, most))
        return self._noted(role, asked, best)

    def _noted(self, role: Role, asked: Asked, engine: ModelEngine) -> ModelEngine:
        if role is Role.PREFILL:
            self._sent.add(engine, asked, len(asked.blocks))
        return engine


class Dynamo:
    """Dynamo with events of the caches: it knows what each engine's cache really holds."""

    def __call__(
        self, role: Role, asked: Asked, engines: Sequence[ModelEngine], *, now: float, chance: Callable[[], float]
    ) -> ModelEngine:
        def cost(engine: ModelEngine) -> float:
            missing = max(0, asked.num_tokens - engine.cache.hit(asked.blocks)) if role is Role.PREFILL else 0
            return missing + engine.load.outstanding_tokens

        costs = [cost(engine) for engine in engines]
        best = [engine for engine, its in zip(engines, costs, strict=True) if its == min(costs)]
        return best[int(chance() * len(best))]


def named_session(asked: Asked) -> bytes:
    """The value of the header ``x-session-id``; empty if it is not there."""
    _, found, rest = asked.request.headers.partition(b"x-session-id: ")
    return rest.partition(b"\r\n")[0] if found else b""


def _running(engine: ModelEngine) -> int:
    return engine.num_running


PEERS: Final[dict[str, Callable[[], Router]]] = {
    "sglang cache-aware": lambda: CacheAware(knows_sessions=False),
    "vllm-router cache-aware": lambda: CacheAware(knows_sessions=True),
    "vllm-router consistent-hash": ConsistentHash,
    "endpoint-picker": EndpointPicker,
    "aibrix": Aibrix,
    "dynamo": Dynamo,
}
"""By name: a function that makes a router without any memory."""
