"""One running request of a key that has limits, and the header lines that tell its client what its key has left.

    waits_for_a_place -> give_back   no engine gets the request: 429 ``queue_full``
    leave                            it is over, however it ended

``key_limits.py`` counts.
"""

from __future__ import annotations

from pdcluster_router.core.clients.key_limits import KeyUse, RateLeft


class KeySlot:
    """One running request. Owned by its cycle."""

    __slots__ = ("_is_held", "_num_tokens", "_use", "lines")

    def __init__(self, use: KeyUse, num_tokens: int, now: float) -> None:
        """The request has just entered ``use`` with ``num_tokens``."""
        self._use = use
        self._num_tokens = num_tokens
        self._is_held = False
        self.lines = rate_lines(use, now)
        """Header lines for its answer; may be empty."""

    def waits_for_a_place(self) -> None:
        """The queue may have no place for the request. Call it in the turn of the event loop in which the request
        entered."""
        self._is_held = True
        self._use.hold(self, self._num_tokens)

    def give_back(self, now: float) -> None:
        """No engine gets the request: the rates of its key get back what it took. A second call does nothing."""
        self._use.give_back(self, now)
        self.lines = rate_lines(self._use, now)

    def leave(self) -> None:
        """The request is over. Call it once."""
        self._use.leave()
        if self._is_held:
            self._use.let_go(self)


def rate_lines(use: KeyUse, now: float) -> bytes:
    """The rest of the key's requests and prompt tokens a minute, by OpenAI's names; empty: it has neither limit."""
    rates = (("requests", use.requests_left(now)), ("tokens", use.tokens_left(now)))
    return b"".join([_lines_of(what, rate) for what, rate in rates if rate is not None])


def _lines_of(what: str, rate: RateLeft) -> bytes:
    text = (
        f"x-ratelimit-limit-{what}: {rate.per_minute}\r\n"
        f"x-ratelimit-remaining-{what}: {rate.left}\r\n"
        f"x-ratelimit-reset-{what}: {round(rate.full_in_s, 3):g}s\r\n"
    )
    return text.encode()
