"""The last requests that were let in from a queue: of which key, and for how many tokens.

    turn     0      1      2      3      4            a request that came after turn 1 and is let in as turn 4
    key      a      a      b      a      b            had 2 requests ahead: one of b, one of a
    tokens  10     10     30     10      5

A request notes the number of the next turn when it begins to wait and when it ends, so waiting costs the same however
many are ahead. When a user asks, a sum looks at each turn between the two numbers. Bounded in turns. Knows no request
and no clock.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

MAX_TURNS: Final = 32_768
"""Half a megabyte: the turns of half a minute (the longest wait by default) at 1,000 requests a second."""
MAX_LOOKED_AT: Final = 4_096
"""The most turns that one sum covers: half a millisecond. An answer to a user has up to 20 sums."""


@dataclass(frozen=True, slots=True)
class LineTurns:
    """The turns of one key in a stretch of turns."""

    name: str
    num_requests: int
    num_tokens: int


class TurnLog:
    """The turns of one queue. One owner."""

    __slots__ = ("_max_looked_at", "_max_turns", "_names", "_tokens", "num_turns")

    def __init__(self, max_turns: int = MAX_TURNS, max_looked_at: int = MAX_LOOKED_AT) -> None:
        """``max_turns``: how many turns are remembered; ``max_looked_at``: how many turns one sum covers."""
        self._max_turns = max_turns
        self._max_looked_at = max_looked_at
        self.num_turns = 0
        """Requests that were let in from the queue so far: the number of the next turn."""
        self._names: list[str] = []
        self._tokens = array("q")

    def note(self, name: str, num_tokens: int) -> None:
        """One more request is let in, of the key with this name."""
        at = self.num_turns % self._max_turns
        if at == len(self._names):
            self._names.append(name)
            self._tokens.append(num_tokens)
        else:
            self._names[at] = name
            self._tokens[at] = num_tokens
        self.num_turns += 1

    def between(self, first: int, end: int) -> list[LineTurns]:
        """The turns in [``first``, ``end``) by key, most tokens first. Covers the last ``max_looked_at`` of them at
        most; empty if the first of these is forgotten.
        """
        first = max(first, end - self._max_looked_at)
        if first < self.num_turns - len(self._names):
            return []
        begin, num = first % self._max_turns, end - first
        names = (self._names[begin : begin + num] + self._names[:num])[:num]
        counts = (self._tokens[begin : begin + num] + self._tokens[:num])[:num]
        tokens = defaultdict[str, int](int)
        for name, num_tokens in zip(names, counts, strict=True):
            tokens[name] += num_tokens
        lines = [LineTurns(name, num, tokens[name]) for name, num in Counter(names).items()]
        return sorted(lines, key=lambda line: (-line.num_tokens, line.name))
