"""What a seed decides: the requests, the faults, and after which request each fault begins. Pure.

The schedule is seeded; the interleaving is the machine's: two runs with one seed inject the same faults at the same
requests, but when bytes, threads and processes meet them is never the same twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from campaign.client import Leave, Order
from campaign.questions import Question


class Site(Enum):
    """What a fault meets."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    METASERVER = "metaserver"
    WIRE = "wire"


class Deed(Enum):
    """What is done there. The first five by a proxy in front of the site's HTTP port."""

    FAIL_500 = "answers 500"
    REFUSE = "refuses connections"
    HANG = "hangs"
    SLOW = "is slow"
    CUT = "cuts connections"
    STOP = "SIGSTOP"
    STOP_CORE = "SIGSTOP of the engine core"
    KILL = "SIGKILL"
    KILL_CORE = "SIGKILL of the engine core"
    FRAMES = "frames lost, doubled, late, swapped"
    WRITES = "writes fail"
    STOP_RANK = "SIGSTOP of one rank"
    KILL_RANK = "SIGKILL of one rank"
    WRITES_OF_RANK = "writes of one rank late or refused"


DECK: Final[tuple[tuple[Site, Deed], ...]] = (
    *((site, deed) for site in (Site.PREFILL, Site.DECODE) for deed in list(Deed)[:9]),
    (Site.ROUTER, Deed.STOP),
    (Site.ROUTER, Deed.KILL),
    *((Site.METASERVER, deed) for deed in (Deed.FAIL_500, Deed.REFUSE, Deed.HANG, Deed.CUT)),
    *((Site.WIRE, deed) for deed in (Deed.FRAMES, Deed.FRAMES, Deed.WRITES, Deed.WRITES)),
)
"""Every fault of a campaign. It is dealt whole, shuffled, again and again: none is left out by chance."""

_STOP_S, _STORM_S = (0.1, 8.0), (1.0, 4.0)
_SECONDS: Final = {
    **dict.fromkeys((Deed.STOP, Deed.STOP_CORE, Deed.STOP_RANK), _STOP_S),
    **dict.fromkeys((Deed.FRAMES, Deed.WRITES, Deed.WRITES_OF_RANK), _STORM_S),
}
_HTTP_SECONDS: Final = (0.3, 3.0)
_LEAVES: Final = 0.12
_LEAVES_EARLY: Final = 0.6
_HAS_TIMEOUT: Final = 0.1
_BURST: Final = 6
"""Requests that come at once, on average."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Begins when request ``at_request`` is sent. ``draw`` in [0, 1) names engine and rank, whatever their number."""

    at_request: int
    site: Site
    deed: Deed
    seconds: float
    draw: float

    def engine_of(self, num_engines: int) -> int:
        """Which of a site's engines it meets."""
        return int(self.draw * num_engines)

    def rank_of(self, num_engines: int, num_ranks: int) -> int:
        """Which rank of that engine. ``draw`` 0.7 of 2 engines with 2 ranks each: engine 1, rank 0."""
        return int(self.draw * num_engines * num_ranks) % num_ranks


def rank_deck(split: Sequence[Site]) -> tuple[tuple[Site, Deed], ...]:
    """Faults of single ranks. ``split``: the sites whose engines have several."""
    at_ranks = tuple((site, deed) for site in split for deed in (Deed.KILL_RANK, Deed.STOP_RANK))
    return (*at_ranks, (Site.PREFILL, Deed.WRITES_OF_RANK)) if split else ()


def make_faults(seed: int, num_requests: int, *, every: int, split: Sequence[Site] = ()) -> tuple[Fault, ...]:
    """One fault for each ``every`` requests, none at the very end. Those of single ranks come first, and again."""
    rng = random.Random(f"faults {seed}")
    pairs = _dealt(rng, rank_deck(split))
    return tuple(_fault(rng, at, *next(pairs)) for at in range(every, num_requests - every, every))


def make_orders(seed: int, num_requests: int, questions: Sequence[Question], *, rate: float) -> tuple[Order, ...]:
    """The requests in their order: ``rate`` in a second on average, in bursts, so that they meet in the engines."""
    rng = random.Random(f"orders {seed}")
    return tuple(_order(rng, index, rng.choice(questions), rate) for index in range(num_requests))


def _dealt(rng: random.Random, first: tuple[tuple[Site, Deed], ...]) -> Iterator[tuple[Site, Deed]]:
    yield from rng.sample(first, len(first))
    while True:
        yield from rng.sample(DECK + first, len(DECK + first))


def _fault(rng: random.Random, at: int, site: Site, deed: Deed) -> Fault:
    return Fault(at, site, deed, rng.uniform(*_SECONDS.get(deed, _HTTP_SECONDS)), rng.random())


def _order(rng: random.Random, index: int, question: Question, rate: float) -> Order:
    is_stream = rng.random() < 0.5
    timeout_s = rng.uniform(0.2, 4.0) if rng.random() < _HAS_TIMEOUT else None
    leave = _leave(rng, is_stream=is_stream) if rng.random() < _LEAVES else None
    gap_s = rng.expovariate(rate / _BURST) if rng.random() < 1 / _BURST else 0.0
    return Order(index, question, is_stream, timeout_s, leave, gap_s)


def _leave(rng: random.Random, *, is_stream: bool) -> Leave:
    is_reset = rng.random() < 0.5
    if not is_stream or rng.random() < _LEAVES_EARLY:
        return Leave(after_s=rng.uniform(0.0, 0.5), is_reset=is_reset)
    return Leave(after_bytes=rng.randint(1, 4000), is_reset=is_reset)
