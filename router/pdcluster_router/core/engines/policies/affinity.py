"""The policy that brings a conversation back to the engine that has its KV: rendezvous hashing with bounded load.

    request -------conversation.py--------> number --> bucket --> its homes: the engines with the highest scores
                  | none: nothing would be found again                    | the first one that is not full
                  v                                                       v all full
             fewest tokens <--------------------------------------- fewest tokens

A score is a hash over bucket and engine's URL. So every router, replica and process sends a conversation to the same
engine, and none has to know what the others did. When an engine goes, its conversations go to the others in equal
parts, and all other conversations stay where they are. A new engine takes its part and no more.

An engine is full when its load is above ``MOST_LOAD`` times the mean plus a part of this prompt. Below that bound, to
wait is better than to have another engine compute the prompt anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from heapq import nlargest
from typing import Final, Generic

from pdcluster_router.core.engines.placement import Chooser, E, Home, RequestFacts, Tally, new_tally
from pdcluster_router.core.engines.policies.conversation import number_of
from pdcluster_router.core.engines.policies.least_tokens import least_loaded

MOST_LOAD: Final = 1.25
"""The bound is this many times the mean load. A lower one sends conversations away for noise, a higher one lets queues
grow. As in "Consistent hashing with bounded loads" (Mirrokni, Thorup, Zadimoghaddam), HAProxy and Envoy."""
PART_OF_PROMPT: Final = 0.5
"""The load that an engine may have above that bound, as a part of the prompt, which it may have cached. With 0,
conversations leave their engines in a quiet pool; with 1, prompts that no engine has cached wait too.
``docs/decisions/0025-affinity.md``."""
NUM_HOMES: Final = 4
"""Engines that are tried in turn. When four are full, hardly any other one has the conversation's KV: the load
decides."""
NUM_BUCKETS: Final = 1 << 14
"""Conversations of one bucket share their homes, so that these need not be worked out for each request. 256 engines
have 64 buckets each, and their parts differ by an eighth; the bound on loads does the rest."""
_LOOKS: Final = 16
"""The mean of N engines is worked out for every N/16-th request. On average, a request adds up 31 loads at most."""
_WORD: Final = (1 << 64) - 1
_FIRST, _NEXT, _FULL, _NONE = Home
"""Names of their own: to find a member in its Enum takes Python 3.11 ten times as long."""


def affinity(engines: Sequence[E], tally: Tally | None = None, /) -> Chooser[E]:
    """Chooses the first of the conversation's homes that is not full; if there is none, as ``least_tokens``."""
    return _Homes(engines, new_tally() if tally is None else tally)


class _Homes(Generic[E]):
    """The homes of each bucket among these engines. Worked out when first asked for, and kept."""

    def __init__(self, engines: Sequence[E], tally: Tally) -> None:
        self._engines = engines
        self._tally = tally
        self._seeds = [(_seed_of(engine.url), index) for index, engine in enumerate(engines)]
        self._homes: dict[int, tuple[E, ...]] = {}
        self._mean_tokens = 0.0
        self._num_until_look = 0

    def __call__(self, request: RequestFacts, /, *, now: float, chance: Callable[[], float]) -> E:
        number = _remembered(request)
        if number is None:
            self._tally[_NONE] += 1
            return least_loaded(self._engines, request, now=now, chance=chance)
        most_tokens = MOST_LOAD * self._mean(now) + PART_OF_PROMPT * request.body.estimated_prompt_tokens
        home = _FIRST
        for engine in self._homes_of(number % NUM_BUCKETS):
            if engine.load.tokens(now=now) <= most_tokens:
                self._tally[home] += 1
                return engine
            home = _NEXT
        self._tally[_FULL] += 1
        return least_loaded(self._engines, request, now=now, chance=chance)

    def _homes_of(self, bucket: int) -> tuple[E, ...]:
        """The homes of a bucket, best first."""
        homes = self._homes.get(bucket)
        if homes is None:
            best = nlargest(NUM_HOMES, [(_score(seed, bucket), index) for seed, index in self._seeds])
            homes = self._homes[bucket] = tuple(self._engines[index] for _, index in best)
        return homes

    def _mean(self, now: float) -> float:
        """The mean load of an engine, in tokens; with many engines it may be a few requests old."""
        if not self._num_until_look:
            self._num_until_look = len(self._engines) // _LOOKS or 1
            self._mean_tokens = sum(engine.load.tokens(now=now) for engine in self._engines) / len(self._engines)
        self._num_until_look -= 1
        return self._mean_tokens


def _remembered(request: RequestFacts) -> int | None:
    """The number of the request's conversation: worked out for decode, and still known when prefill is placed."""
    notes = request.notes
    if not notes:
        notes.append(number_of(request))
    return notes[0]


def _seed_of(url: str) -> int:
    """A hash of the URL that is the same in every process; Python's own ``hash`` is not."""
    return int.from_bytes(blake2b(url.encode(), digest_size=8).digest(), "big")


def _score(seed: int, bucket: int) -> int:
    """Two rounds of splitmix64: each bit of the bucket changes about half of the score's bits."""
    mixed = (seed ^ bucket * 0x9E3779B97F4A7C15) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31
