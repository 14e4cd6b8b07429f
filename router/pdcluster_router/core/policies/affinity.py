"""The policy that brings a conversation back to the engine that has its KV: rendezvous hashing with bounded load.

    request --core/policies/conversation.py--> number --> bucket --> its homes: the engines with the highest scores
                  | none: nothing would be found again                    | the first one that is not full
                  v                                                       v all full
             fewest tokens <--------------------------------------- fewest tokens

A score is a hash over bucket and engine's URL. So every router, replica and process sends a conversation to the same
engine, and none has to know what the others did. An engine that goes leaves its conversations to the rest in equal
parts, and all others stay where they are; one that comes takes its part and no more.

An engine is full when it has more to do than ``MOST_LOAD`` times the mean and a part of this prompt together: to wait
behind so much is better than to have another engine compute the prompt anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from heapq import nlargest
from typing import Final, Generic

from pdcluster_router.core.placement import Chooser, E, Home, RequestFacts, Tally, new_tally
from pdcluster_router.core.policies.conversation import number_of
from pdcluster_router.core.policies.least_tokens import least_loaded

MOST_LOAD: Final = 1.25
"""Times the mean. Less sends conversations away for noise, more lets queues grow: "Consistent hashing with bounded
loads" (Mirrokni, Thorup, Zadimoghaddam), and what HAProxy and Envoy make of it."""
PART_OF_PROMPT: Final = 0.5
"""The load that an engine may have above that bound, as a part of the prompt, which it may have cached. With 0
conversations leave their engines in a quiet pool; with 1 prompts wait that no engine has cached.
``docs/decisions/0025-affinity.md``."""
NUM_HOMES: Final = 4
"""Engines that are tried in turn. When four are full nothing is left to be near to: the load decides."""
NUM_BUCKETS: Final = 1 << 14
"""Conversations of one bucket share their homes, so that these need not be worked out for each request. 64 buckets for
each of 256 engines are even to an eighth, and the bound does the rest."""
_LOOKS: Final = 16
"""Loads that are added up for one request at most, on the average, to know the mean."""
_WORD: Final = (1 << 64) - 1
_FIRST, _NEXT, _FULL, _NONE = Home
"""To find a member in its Enum takes Python 3.11 ten times as long."""


def affinity(engines: Sequence[E], tally: Tally | None = None, /) -> Chooser[E]:
    """The engine that has had this conversation, unless that one is full."""
    return _Homes(engines, new_tally() if tally is None else tally)


class _Homes(Generic[E]):
    """Where the conversations of these engines are at home. Worked out when first asked for, and kept."""

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
        """Best first."""
        homes = self._homes.get(bucket)
        if homes is None:
            best = nlargest(NUM_HOMES, [(_score(seed, bucket), index) for seed, index in self._seeds])
            homes = self._homes[bucket] = tuple(self._engines[index] for _, index in best)
        return homes

    def _mean(self, now: float) -> float:
        """Tokens that an engine has to do; of many engines as they were a few requests ago."""
        if not self._num_until_look:
            self._num_until_look = len(self._engines) // _LOOKS or 1
            self._mean_tokens = sum(engine.load.tokens(now=now) for engine in self._engines) / len(self._engines)
        self._num_until_look -= 1
        return self._mean_tokens


def _remembered(request: RequestFacts) -> int | None:
    """The request's number: worked out for decode, and still known when its prefill is placed."""
    notes = request.notes
    if not notes:
        notes.append(number_of(request))
    return notes[0]


def _seed_of(url: str) -> int:
    """Of Python's own ``hash`` each process has another one."""
    return int.from_bytes(blake2b(url.encode(), digest_size=8).digest(), "big")


def _score(seed: int, bucket: int) -> int:
    """Two rounds of splitmix64: each bit of the bucket changes half of the score's."""
    mixed = (seed ^ bucket * 0x9E3779B97F4A7C15) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31
