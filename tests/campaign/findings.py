"""What a campaign found, and whether it is good: the list of what must be zero. Pure.

A campaign that broke everything proves as little as one that broke nothing: too few right answers count as a failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from campaign.client import Order
from campaign.outcomes import End, Verdict

MIN_OK: Final = 0.25
"""Share of right answers below which a campaign proves nothing."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One request's end. ``begin`` and ``end``: monotonic seconds. ``faults``: lines, for those that are bad."""

    order: Order
    request_id: str
    verdict: Verdict
    begin: float
    end: float
    faults: tuple[str, ...] = ()

    @property
    def is_bad(self) -> bool:
        return self.verdict.end in (End.HUNG, End.WRONG, End.UNCLEAR)


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine, idle: at the start of the campaign or after its quiet time. ``problem``: it did not tell."""

    used_share: float = 0.0
    """Of its KV blocks, in [0, 1]."""
    num_running: float = 0.0
    num_waiting: float = 0.0
    left: tuple[Mapping[str, int], ...] = ()
    """What each rank still has for requests, by what it is: see ``leftovers.py``."""
    problem: str = ""

    @property
    def num_left(self) -> int:
        """Of everything, on all ranks."""
        return sum(count for rank in self.left for count in rank.values())


@dataclass(slots=True)
class Findings:
    """Everything a report tells. Filled while the campaign goes on."""

    requests: list[Ended] = field(default_factory=list)
    afterwards: list[Ended] = field(default_factory=list)
    """Requests after the faults: each must be answered, and right."""
    at_start: dict[str, EngineState] = field(default_factory=dict)
    at_end: dict[str, EngineState] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    ports_left: list[int] = field(default_factory=list)
    breakdown: str = ""
    """Why the campaign itself could not go on."""

    def zeros(self) -> dict[str, int]:
        """What must be zero, by name."""
        ends = Counter(ended.verdict.end for ended in self.requests)
        return {
            "hung": ends[End.HUNG],
            "wrong tokens": ends[End.WRONG] + sum(ended.verdict.end is End.WRONG for ended in self.afterwards),
            "unclear ends": ends[End.UNCLEAR],
            "not answered after the faults": sum(ended.verdict.end is not End.OK for ended in self.afterwards),
            "engines with leaked blocks": len(leaks(self.at_start, self.at_end)),
            "left on ranks": sum(state.num_left for state in self.at_end.values()),
            "deaths not injected": len(self.deaths),
            "orphan processes": len(self.orphans),
            "ports still open": len(self.ports_left),
            "campaign broken off": int(bool(self.breakdown)),
            "too few right answers": int(ends[End.OK] < MIN_OK * len(self.requests)),
        }

    @property
    def is_good(self) -> bool:
        return bool(self.requests) and bool(self.afterwards) and bool(self.at_end) and not any(self.zeros().values())


def leaks(at_start: Mapping[str, EngineState], at_end: Mapping[str, EngineState]) -> list[str]:
    """One line for each engine that does not stand as it stood at the start; no state at the end is one, too."""
    lines = []
    for name, before in at_start.items():
        after = at_end.get(name, EngineState(problem="was not looked at"))
        if before != after:
            lines.append(f"{name}: {before} at the start, {after} at the end")
    return lines


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below ``share`` of them; 0 of nothing. ``share`` in (0, 1]."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
