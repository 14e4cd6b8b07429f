"""The load of an engine in tokens, and the length of answers: placement compares these.

A request counts with its prompt and with as many answer tokens as answers have here, or as its own limit if that is
less: a limit is a bound and no forecast. A failed request goes on counting for some seconds, so that an engine that
fails at once is not always the one with the least to do.
"""

from __future__ import annotations

from typing import Final

FAILED_HALF_LIFE_S: Final = 2.0
"""After so many seconds a failed request counts half. About as long as an ordinary answer would have taken."""

FIRST_ANSWER_TOKENS: Final = 256
"""An answer's tokens before any has ended."""
LEAST_ANSWER_TOKENS: Final = 16
MOST_ANSWER_TOKENS: Final = 8192

_WEIGHT: Final = 1 / 64
_EVENT_BYTES_PER_TOKEN: Final = 200
"""An event of a stream with one token: measured with vLLM 0.32, 180 (completions) to 240 (chat)."""
_BYTES_PER_TOKEN: Final = 4
_FORGOTTEN_TOKENS: Final = 1.0


class Load:
    """One engine's load, as far as this router knows. Owned by its engine."""

    __slots__ = ("_failed_at", "_failed_tokens", "num_placed", "outstanding_tokens")

    def __init__(self, outstanding_tokens: int = 0, num_placed: int = 0) -> None:
        self.outstanding_tokens = outstanding_tokens
        """Tokens of requests that were placed there and have not ended."""
        self.num_placed = num_placed
        """Requests placed there since the router started."""
        self._failed_tokens = 0.0
        self._failed_at = 0.0

    def add_failed(self, num_tokens: int, *, now: float) -> None:
        """A request of ``num_tokens`` has failed there."""
        self._failed_tokens = self._failed_left(now) + num_tokens
        self._failed_at = now

    def tokens(self, *, now: float) -> float:
        """The load that placement compares: requests that run there, and those that have failed there lately."""
        if not self._failed_tokens:
            return self.outstanding_tokens
        return self.outstanding_tokens + self._failed_left(now)

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
        """An answer of ``num_bytes`` has ended. Tokens are not counted: bytes are near enough for a mean."""
        num_tokens = num_bytes / (_EVENT_BYTES_PER_TOKEN if is_stream else _BYTES_PER_TOKEN)
        bounded = min(MOST_ANSWER_TOKENS, max(LEAST_ANSWER_TOKENS, num_tokens))
        self._mean_tokens += (bounded - self._mean_tokens) * _WEIGHT

    def expected(self, limit: int | None) -> int:
        """About how many tokens an answer will have; ``limit``: what the client allows."""
        mean = int(self._mean_tokens)
        return mean if limit is None or limit > mean else limit
