"""The numbers of one model: tokens and seconds of its answers, of all but gaps those that ended well.

    prompt and cached tokens    as decode's reservation says, else as the answer's ``usage`` does
    answer tokens               as ``usage`` says; none says them where a client's stream has no ``usage``
    seconds of a token          of streams of one sequence that have ``usage``: from their first byte to their end,
                                by the tokens after the first one
    gaps                        between two pieces of a stream of one sequence, also of one that breaks off

Knows no clock, and not which models there are.
"""

from __future__ import annotations

from bisect import bisect_left

from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.telemetry.answer_facts import token_counts_in
from pdcluster_router.core.telemetry.histogram import COARSE, PER_TOKEN, TOKENS, Histogram


class ModelNumbers:
    """Owned by the router's metrics. Event loop only."""

    __slots__ = ("answer_tokens", "cached_tokens", "first_byte", "gaps", "prompt_tokens", "token_s")

    def __init__(self) -> None:
        self.first_byte = Histogram(COARSE)
        """Seconds from requests to the first byte of their answers."""
        self.prompt_tokens = Histogram(TOKENS)
        self.cached_tokens = Histogram(TOKENS)
        self.answer_tokens = Histogram(TOKENS)
        self.token_s = Histogram(PER_TOKEN)
        self.gaps = Histogram(PER_TOKEN)
        """Seconds. Streams that run add to it."""

    def answered(self, prompt: RequestTrace | None, end: bytes | bytearray, stream_s: float | None = None) -> None:
        """One more answer has ended well. ``prompt``: has the prompt's tokens, if decode has said them before.
        ``end``: the answer's last bytes. ``stream_s``: from a stream's first byte to its end, if it was of one
        sequence."""
        counts = token_counts_in(end)
        known = counts if prompt is None or prompt.prompt_tokens is None else prompt
        for histogram, number in (
            (self.prompt_tokens, known.prompt_tokens),
            (self.cached_tokens, known.cached_tokens),
            (self.answer_tokens, counts.output_tokens),
        ):
            if number is not None:
                histogram.counts[bisect_left(TOKENS, number)] += 1  # ``Histogram.add``, without a call.
                histogram.total += number
        if stream_s is not None and (num_tokens := counts.output_tokens or 0) > 1:
            self.token_s.add(stream_s / (num_tokens - 1))
