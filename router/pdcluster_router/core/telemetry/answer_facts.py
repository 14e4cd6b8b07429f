"""The facts of an answer, from the bytes that went to its client: their number, the gaps between them, and the tokens.

    chunks --add()--> AnswerFacts   bytes, when the first came, and the end, where decode says its ``usage``
                      StreamFacts   also events, and the gaps between chunks

Nothing is parsed before the end. Memory is bounded: some KiB of the end, and one count for each bucket of gaps. Knows
no clock and no connection.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Annotated, Final, TypeAlias

import msgspec

END_BYTES: Final = 1024
"""How many bytes at the end of an answer are searched for ``usage``: vLLM's has up to 250, and some dozens follow
it."""
_MOST_KEPT_BYTES: Final = 4 * END_BYTES
"""A kept end that is longer is cut to ``END_BYTES``, so that not every chunk costs a cut."""
STEP: Final = 10 ** (1 / 16)
"""Ratio of one bucket's bound to the bound before it, 1.155: a gap is at most 7.5 % off its bucket's middle."""
LEAST_GAP_S: Final = 1e-5
"""Shorter gaps count as this long."""
MOST_GAP_S: Final = 1e3
"""Longer gaps count as this long, except in ``max_gap_s``."""
_BOUNDS: Final = tuple(LEAST_GAP_S * STEP**number for number in range(16 * 8 + 1))
_EVENT: Final = b"\ndata: {"
"""A line end, and how a vLLM event other than ``[DONE]`` begins. Text in JSON never matches: it has no line end."""
_LESS_THAN_AN_EVENT: Final = len(_EVENT) - 1
"""Up to so many bytes at the end may begin an event that is not counted yet."""
_BEFORE: Final = b"\n" * len(_EVENT)
"""Stands before the first chunk: an event at its very beginning is counted too."""
_USAGE: Final = b'"usage"'
"""In text these quotes would be escaped. The input of a tool may have them, but vLLM writes its own behind that."""


class TokenCounts(msgspec.Struct, frozen=True):
    """The counts that decode says in its answer; None: it does not say this one."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class AnswerFacts:
    """One answer. Owned by its cycle."""

    __slots__ = ("_end", "first_at", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of the answer's body, without what the router adds."""
        self.first_at: float | None = None
        """When the first of these bytes went to the client, monotonic seconds."""
        self._end = bytearray(_BEFORE)

    def add(self, chunk: bytes, now: float) -> None:
        """``chunk`` goes to the client now. Not empty."""
        self.num_bytes += len(chunk)
        if self.first_at is None:
            self.first_at = now
        self._end += chunk[-END_BYTES:]
        if len(self._end) > _MOST_KEPT_BYTES:
            del self._end[:-END_BYTES]

    @property
    def token_counts(self) -> TokenCounts:
        return token_counts_in(bytes(self._end[-END_BYTES:]))


class StreamFacts(AnswerFacts):
    """One answer that is a stream of events. A chunk costs half a microsecond."""

    __slots__ = ("_gaps", "_last_at", "max_gap_s", "num_events")

    def __init__(self) -> None:
        super().__init__()
        self.num_events = 0
        """Without ``[DONE]``."""
        self.max_gap_s = 0.0
        """The longest time between two chunks; 0 for fewer than two chunks."""
        self._last_at = 0.0
        self._gaps: dict[int, int] = {}
        """The number of gaps in each bucket."""

    def add(self, chunk: bytes, now: float) -> None:
        # One function, and no call in it that can be spared: it runs for each token.
        self.num_bytes += len(chunk)
        end = self._end
        num_known = len(end) - _LESS_THAN_AN_EVENT
        end += chunk
        self.num_events += end.count(_EVENT, num_known)
        if len(end) > _MOST_KEPT_BYTES:
            del end[:-END_BYTES]
        if self.first_at is None:
            self.first_at = now
        else:
            gap_s = now - self._last_at
            if gap_s > self.max_gap_s:
                self.max_gap_s = gap_s
            bucket = bisect_left(_BOUNDS, gap_s)
            self._gaps[bucket] = self._gaps.get(bucket, 0) + 1
        self._last_at = now

    @property
    def p50_gap_s(self) -> float | None:
        """The lower median of the gaps, up to 7.5 % off; None: there are none."""
        left = (sum(self._gaps.values()) + 1) // 2
        for bucket in sorted(self._gaps):
            left -= self._gaps[bucket]
            if left <= 0:
                return min(_middle_of(bucket), self.max_gap_s)
        return None


def _middle_of(bucket: int) -> float:
    if bucket == 0:
        return LEAST_GAP_S
    return MOST_GAP_S if bucket >= len(_BOUNDS) else _BOUNDS[bucket] / STEP**0.5


def token_counts_in(end: bytes | bytearray) -> TokenCounts:
    """The last ``usage`` in the end of an answer, of any API: in its last ``END_BYTES``.

    Example: ``...,"usage":{"prompt_tokens":7,"completion_tokens":2}}`` -> 7, 2, None.
    """
    if not (said := _usage_in(end)):
        return _NO_COUNTS
    try:
        usage = _DECODER.decode(said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NO_COUNTS
    if usage.input_tokens_details is not None:
        return TokenCounts(usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens)
    if usage.input_tokens is not None:
        return _anthropic_counts_of(usage)
    details = usage.prompt_tokens_details
    return TokenCounts(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details else None)


def _usage_in(end: bytes | bytearray) -> bytes | bytearray:
    """The object of the last ``usage``; empty: there is none. It may hold objects that hold objects, as those with
    the tokens of images (vLLM 0.32), and no deeper ones."""
    at = end.rfind(_USAGE, -END_BYTES)
    if at >= 0 and end.startswith(_COMPACT, at):
        begin = at + len(_USAGE) + 1
        behind = end.find(b"}", begin) + 1
        if end.find(b"{", begin + 1, behind) < 0:  # As a rule. The regular expression takes twice as long.
            return end[begin:behind]
    found = _OBJECT.match(end, at + 1)
    return found[1] if found is not None else b""


_NumTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Details(msgspec.Struct):
    cached_tokens: _NumTokens | None = None


class _Usage(msgspec.Struct):
    """``usage`` of any API. Anthropic's ``input_tokens`` leave out tokens that a cache had, or was given. Those of
    OpenAI's Responses API count them, and that API alone has ``input_tokens_details``."""

    prompt_tokens: _NumTokens | None = None
    completion_tokens: _NumTokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _NumTokens | None = None
    output_tokens: _NumTokens | None = None
    cache_read_input_tokens: _NumTokens | None = None
    cache_creation_input_tokens: _NumTokens | None = None
    input_tokens_details: _Details | None = None


def _anthropic_counts_of(usage: _Usage) -> TokenCounts:
    cached = usage.cache_read_input_tokens
    num_prompt = (usage.input_tokens or 0) + (cached or 0) + (usage.cache_creation_input_tokens or 0)
    return TokenCounts(num_prompt, usage.output_tokens, cached)


_COMPACT: Final = _USAGE + b":{"
"""How vLLM writes it."""
_INNER: Final = rb"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
_OBJECT: Final = re.compile(rb'usage"\s*:\s*(\{[^{}]*(?:' + _INNER + rb"[^{}]*)*\})")
"""``usage`` from behind its first quote, and its object."""
_DECODER: Final = msgspec.json.Decoder(_Usage)
_NO_COUNTS: Final = TokenCounts()
