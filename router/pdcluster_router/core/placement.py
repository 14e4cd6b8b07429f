"""Which engine takes the next request.

Decides from counts alone. A policy sees the candidates and names one; it does not know roles, URLs or health.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """What one engine has to do, as far as this router knows."""

    outstanding_tokens: int
    """Tokens of requests that were placed there and have not ended."""
    num_placed: int
    """Requests placed there since the router started."""


class Policy(Protocol):
    def choose(self, loads: Sequence[Load]) -> int:
        """The index of the engine to take. ``loads`` has at least one."""
        ...


class LeastTokens:
    """The engine with the least outstanding tokens; between equals the one that got fewer requests."""

    def choose(self, loads: Sequence[Load]) -> int:
        return min(range(len(loads)), key=lambda index: (loads[index].outstanding_tokens, loads[index].num_placed))


def eligible(healthy: Sequence[bool], excluded: Sequence[bool]) -> list[int]:
    """Indexes of engines to choose from: not excluded and healthy, or, when none is, all that are not excluded.

    An engine that fails its probes is still better than no engine: the connection itself decides.
    """
    allowed = [index for index, is_excluded in enumerate(excluded) if not is_excluded]
    return [index for index in allowed if healthy[index]] or allowed
