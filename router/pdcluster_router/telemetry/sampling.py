"""The choice of requests that get spans, and the words in which engines are told of the trace.

A caller that says in ``traceparent`` whether it records its span has decided for this request too. Of requests without
a valid one the set part is chosen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdcluster_router.core.apis.trace_context import STATE_HEADER, TRACE_HEADER, parent_in
from pdcluster_router.core.telemetry.request_trace import (
    NUM_FRESH_BYTES,
    SAMPLED,
    SampledTrace,
    begun,
    continued,
    is_chosen,
    unrecorded_line,
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The consequences for one request."""

    trace: SampledTrace | None
    """None: it gets no spans."""
    not_forwarded: frozenset[bytes]
    """The headers that engines do not get as they came."""
    line: bytes = b""
    """The header line that each engine gets; of a request with spans each call to an engine has a line of its own."""


class Sampling:
    """Owned by the router. Event loop only."""

    def __init__(self, ratio: float, not_forwarded: frozenset[bytes]) -> None:
        """``ratio``: of requests without a valid ``traceparent``. ``not_forwarded``: headers that no engine gets."""
        self._ratio: Final = ratio
        self._without_parent: Final = not_forwarded | {TRACE_HEADER}
        self._without_state: Final = not_forwarded | {TRACE_HEADER, STATE_HEADER}
        """A ``tracestate`` belongs to the ``traceparent`` that it came with."""
        self._as_it_came: Final = Sampled(None, not_forwarded)

    def of(self, headers: Sequence[tuple[bytes, bytes]], fields: Mapping[bytes, bytes]) -> Sampled:
        """Whether the request with these headers gets spans. ``fields``: the same by name."""
        parent = parent_in(headers, fields)
        if parent is not None and not parent.flags & SAMPLED:
            return self._as_it_came
        fresh = os.urandom(NUM_FRESH_BYTES)
        if parent is not None:
            trace = continued(parent.trace_id, parent.span_id, parent.flags, fresh)
            return Sampled(trace, self._without_parent)
        if is_chosen(fresh, self._ratio):
            return Sampled(begun(fresh), self._without_state)
        return Sampled(None, self._without_state, unrecorded_line(fresh))
