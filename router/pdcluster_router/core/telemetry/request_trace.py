"""The ids of one sampled request's spans, and the ``traceparent`` that each engine gets: W3C Trace Context.

    caller's span --traceparent--> span of the request, S
                                     +-- first call to an engine: S + 1   --traceparent--> the engine's own spans
                                     +-- second call: S + 2 ...
                                     +-- steps of the request: S + 2^16 and more
                                     +-- first part: S + 2^32, with calls and steps of its own

Ids are counted from one random id. So they are known before there are spans, and the calls to engines need no memory
of their own. The spans themselves are made after the request has ended (``spans.py``).
"""

from __future__ import annotations

from typing import Final

import msgspec

SAMPLED: Final = 1
_RANDOM: Final = 2
_KNOWN_FLAGS: Final = SAMPLED | _RANDOM
NUM_TRACE_BYTES: Final = 16
NUM_SPAN_BYTES: Final = 8
NUM_FRESH_BYTES: Final = NUM_TRACE_BYTES + NUM_SPAN_BYTES
_MOST_SPANS: Final = 1 << 64
_FIRST_STEP: Final = 1 << 16
"""Far above the number of calls that one request can make: ``max_prefill_attempts`` times ``max_decode_attempts`` is
10,000 at most."""
_PART: Final = 1 << 32


class SpanIds(msgspec.Struct, frozen=True):
    """The ids that the spans of one request, or of one part of it, are made of."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: int
    """Of the request's span, or of the part's."""
    parent_id: int = 0
    """The span of the caller; of a part: of its whole. 0: the trace begins here."""
    is_part: bool = False

    def call(self, number: int) -> int:
        """The span of the call to an engine with this number. The first one is 1."""
        return _plus(self.span_id, number)

    def step(self, number: int) -> int:
        """The span of the step with this number. The first one is 0."""
        return _plus(self.span_id, _FIRST_STEP + number)


class SampledTrace:
    """The trace of one sampled request, or of one part of it. Its exchange owns it."""

    __slots__ = ("_num_calls", "flags", "ids")

    def __init__(self, ids: SpanIds, flags: int) -> None:
        self.ids = ids
        self.flags = flags & _KNOWN_FLAGS
        self._num_calls = 0

    def next_line(self) -> bytes:
        """The header line for the next call to an engine: its parent is the span of this call."""
        self._num_calls += 1
        return line_of(self.ids.trace_id, self.ids.call(self._num_calls), self.flags)

    def part(self, number: int) -> SampledTrace:
        """The trace of the part with this number, from 0."""
        ids = self.ids
        return SampledTrace(
            SpanIds(ids.trace_id, _plus(ids.span_id, _PART * (number + 1)), ids.span_id, is_part=True), self.flags
        )


def continued(trace_id: str, parent_id: str, flags: int, fresh: bytes) -> SampledTrace:
    """The trace of a request whose caller records its own span. ``fresh``: ``NUM_FRESH_BYTES`` random bytes."""
    return SampledTrace(SpanIds(trace_id, _span_in(fresh), int(parent_id, 16)), flags)


def begun(fresh: bytes) -> SampledTrace:
    """A new trace. ``fresh``: as in ``continued``."""
    return SampledTrace(SpanIds(_trace_in(fresh), _span_in(fresh)), SAMPLED | _RANDOM)


def is_chosen(fresh: bytes, ratio: float) -> bool:
    """Whether the new trace with these random bytes is one of those that are recorded: of all traces the part
    ``ratio``, 0 to 1. Decided from the trace id, so that other hops with this ratio decide alike."""
    return int.from_bytes(fresh[NUM_TRACE_BYTES - 8 : NUM_TRACE_BYTES]) < ratio * _MOST_SPANS


def unrecorded_line(fresh: bytes) -> bytes:
    """The header line that tells engines not to record a request that this router does not record."""
    return line_of(_trace_in(fresh), _span_in(fresh), _RANDOM)


def line_of(trace_id: str, span_id: int, flags: int) -> bytes:
    return b"traceparent: 00-%b-%016x-%02x\r\n" % (trace_id.encode("ascii"), span_id, flags)


def _plus(span_id: int, number: int) -> int:
    return (span_id - 1 + number) % (_MOST_SPANS - 1) + 1  # An id of zeros is none, and no two numbers meet.


def _trace_in(fresh: bytes) -> str:
    return fresh[:NUM_TRACE_BYTES].hex()


def _span_in(fresh: bytes) -> int:
    return int.from_bytes(fresh[NUM_TRACE_BYTES:NUM_FRESH_BYTES]) or 1
