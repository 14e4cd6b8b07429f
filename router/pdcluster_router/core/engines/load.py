"""The load of an engine in tokens, and the length of answers: placement compares these.

A request counts with its prompt, and with the mean length of answers or its own limit, whichever is less: a limit is a
bound and no forecast. A failed request goes on counting for some seconds, so that an engine that fails at once is not
always the one with the least to do.

An engine that has just begun to serve, or that is back, starts slowly: its tokens count ten times at first, and less
and less for ``SLOW_START_S``. So it takes a tenth of what the others have, and then more, while caches fill and kernels
compile. It can always be chosen: with nothing to do it has the least, and an engine that is alone gets everything.
"""

from __future__ import annotations

from typing import Final, Protocol

FAILED_HALF_LIFE_S: Final = 2.0
"""After so many seconds a failed request counts half. About as long as an ordinary answer would have taken."""

SLOW_START_S: Final = 10.0
"""Seconds until a new engine counts like any other. A few prompts warm it up; a longer start only loads the others."""
FIRST_PART: Final = 0.1
"""The part of the others' load that a new engine takes at first: Envoy's least weight in its slow start."""

FIRST_ANSWER_TOKENS: Final = 256
"""The expected tokens of an answer before the first answer has ended."""
LEAST_ANSWER_TOKENS: Final = 16
MOST_ANSWER_TOKENS: Final = 8192

_WEIGHT: Final = 1 / 64
_EVENT_BYTES_PER_TOKEN: Final = 200
"""Bytes of a stream's event with one token: 180 (completions) to 240 (chat), measured with vLLM 0.32."""
_BYTES_PER_TOKEN: Final = 4
_FORGOTTEN_TOKENS: Final = 1.0


class OthersLoad(Protocol):
    """The load of one engine in the other processes of this router."""

    def others(self) -> int:
        """Tokens that the others have there."""
        ...


class Load:
    """One engine's load, as far as this router knows. Owned by its engine."""

    __slots__ = ("_failed_at", "_failed_tokens", "_others", "_slow_until", "outstanding_tokens", "placed_at")

    def __init__(self, outstanding_tokens: int = 0, placed_at: float = 0.0, others: OthersLoad | None = None) -> None:
        """``others``: of the router's other processes; None: there are none."""
        self._others = others
        self.outstanding_tokens = outstanding_tokens
        """Tokens of requests that this process has placed there and that have not ended."""
        self.placed_at = placed_at
        """When it got its last request, monotonic seconds. Not a count of requests: by a count, a new engine would get
        every request of a quiet pool until it had had as many as the others."""
        self._slow_until = 0.0
        self._failed_tokens = 0.0
        self._failed_at = 0.0

    def add_failed(self, num_tokens: int, *, now: float) -> None:
        """A request of ``num_tokens`` has failed there."""
        self._failed_tokens = self._failed_left(now) + num_tokens
        self._failed_at = now

    def start_slowly(self, *, now: float) -> None:
        """The engine begins to serve, or is back."""
        self._slow_until = now + SLOW_START_S

    def slow_start_s(self, *, now: float) -> float:
        """Seconds until the engine counts like any other; 0: it does already."""
        return max(0.0, self._slow_until - now)

    def tokens(self, *, now: float) -> float:
        """The load that placement compares: what runs there and what has failed there lately, counted more in a slow
        start."""
        running = self.outstanding_tokens if self._others is None else self.outstanding_tokens + self._others.others()
        if not (self._failed_tokens or self._slow_until):
            return running
        return (running + self._failed_left(now)) / self._part(now)

    def _part(self, now: float) -> float:
        """The part of the others' load that this engine may have, in [``FIRST_PART``, 1]."""
        left_s = self._slow_until - now
        if left_s <= 0:
            self._slow_until = 0.0
            return 1.0
        return 1.0 - (1.0 - FIRST_PART) * min(1.0, left_s / SLOW_START_S)

    def _failed_left(self, now: float) -> float:
        left: float = self._failed_tokens * 0.5 ** ((now - self._failed_at) / FAILED_HALF_LIFE_S)
        if left < _FORGOTTEN_TOKENS:
            self._failed_tokens = left = 0.0
        return left


class AnswerLength:
    """How many tokens an answer has, as a running mean over those that have ended. One for a router."""

    __slots__ = ("_mean_tokens",)

    def __init__(self) -> None:
        self._mean_tokens = float(FIRST_ANSWER_TOKENS)

    def saw(self, num_bytes: int, *, is_stream: bool) -> None:
        """An answer of ``num_bytes`` has ended. Tokens are not counted: bytes are near enough for a mean. Of an answer
        that went by unread the router has one byte, which tells nothing."""
        if num_bytes <= 1:
            return
        num_tokens = num_bytes / (_EVENT_BYTES_PER_TOKEN if is_stream else _BYTES_PER_TOKEN)
        if num_tokens < LEAST_ANSWER_TOKENS:
            num_tokens = LEAST_ANSWER_TOKENS
        elif num_tokens > MOST_ANSWER_TOKENS:
            num_tokens = MOST_ANSWER_TOKENS
        self._mean_tokens += (num_tokens - self._mean_tokens) * _WEIGHT

    def expected(self, limit: int | None) -> int:
        """About how many tokens an answer will have; ``limit``: what the client allows."""
        mean = int(self._mean_tokens)
        return mean if limit is None or limit > mean else limit
