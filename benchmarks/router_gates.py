"""The gates of ``router_peers``: what our router shall reach beside its peers, and whether it does. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.figures import ratios, times
from benchmarks.router_contenders import OURS, Contender, Flow

MOST_HELD_MB: Final = 80.0
MOST_FOR_MANY: Final = 1.05
LEAST_REQUESTS: Final = 1.3
"""Our requests/s of a core, divided by those of the best peer."""


@dataclass(slots=True)
class Figures:
    """Figures of one contender, with one value for each round."""

    small_us: list[float] = field(default_factory=list)
    """CPU of a request with a prompt of 1 KB, 64 connections."""
    large_us: list[float] = field(default_factory=list)
    """CPU of a request with 100,000 tokens of text, 8 connections."""
    chunk_us: list[float] = field(default_factory=list)
    """CPU of one event of a stream, 200 streams with one each 20 ms."""
    held_mb: list[float] = field(default_factory=list)
    """Resident memory with 1,000 open streams."""
    added_p50_us: list[float] = field(default_factory=list)
    added_p99_us: list[float] = field(default_factory=list)
    """Time of an answer through the router, at a fixed rate, minus the time of an engine asked directly just before."""
    many_us: list[float] = field(default_factory=list)
    """As ``small_us``, with many engines. Only ours has it."""


@dataclass(frozen=True, slots=True)
class Gate:
    """``figure``: what was measured. ``wanted``: what it is held against."""

    name: str
    figure: str
    wanted: str
    holds: bool

    @property
    def row(self) -> tuple[str, str, str, str]:
        return self.name, self.figure, self.wanted, "yes" if self.holds else "**no**"


GATE_COLUMNS: Final = ("gate", "measured", "wanted", "holds")

_COSTS: Final[dict[str, Callable[[Figures], list[float]]]] = {
    "CPU of 100,000 tokens": lambda figures: figures.large_us,
    "CPU of an event": lambda figures: figures.chunk_us,
    "added p50": lambda figures: figures.added_p50_us,
    "added p99": lambda figures: figures.added_p99_us,
}


def gates_of(found: Mapping[Contender, Figures], num_many: int) -> Iterator[Gate]:
    """The gates that can be told from ``found``. Medians of rounds; ratios are of the same round."""
    for flow in Flow:
        ours = [figures for one, figures in found.items() if one.flow is flow and one.name == OURS]
        peers = {one.name: figures for one, figures in found.items() if one.flow is flow and one.name != OURS}
        for own in ours:
            if peers:
                yield from (_cost_gate(f"{flow.value}: {name}", own, peers, cost) for name, cost in _COSTS.items())
                if flow is Flow.PREFILL_DECODE:
                    yield _requests_gate(own, peers)
            yield from _own_gates(flow, own, num_many)


def _cost_gate(name: str, own: Figures, peers: Mapping[str, Figures], cost: Callable[[Figures], list[float]]) -> Gate:
    medians = {peer: statistics.median(cost(figures)) for peer, figures in peers.items()}
    best = min(medians, key=lambda peer: medians[peer])
    ours = statistics.median(cost(own))
    return Gate(name, f"{ours:,.1f} us", f"at most {medians[best]:,.1f} us ({best})", ours <= medians[best])


def _requests_gate(own: Figures, peers: Mapping[str, Figures]) -> Gate:
    best = min(peers, key=lambda peer: statistics.median(peers[peer].small_us))
    ratio = ratios(peers[best].small_us, own.small_us)
    name = f"{Flow.PREFILL_DECODE.value}: requests/s of a core beside the best peer"
    return Gate(name, times(ratio), f"at least {LEAST_REQUESTS} ({best})", ratio.median >= LEAST_REQUESTS)


def _own_gates(flow: Flow, own: Figures, num_many: int) -> Iterator[Gate]:
    held = statistics.median(own.held_mb)
    name = f"{flow.value}: memory with 1,000 streams"
    yield Gate(name, f"{held:,.0f} MB", f"at most {MOST_HELD_MB:,.0f} MB", held <= MOST_HELD_MB)
    if own.many_us:
        ratio = ratios(own.many_us, own.small_us)
        name = f"{flow.value}: CPU of a request with {num_many} engines beside few"
        yield Gate(name, times(ratio), f"at most {MOST_FOR_MANY}", ratio.median <= MOST_FOR_MANY)


def rows_of_gates(found: Mapping[Contender, Figures], num_many: int) -> Sequence[tuple[str, ...]]:
    return [gate.row for gate in gates_of(found, num_many)]
