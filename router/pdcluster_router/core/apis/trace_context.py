"""The trace of a request: W3C Trace Context, ``traceparent``.

A router without spans sends the header to engines as it came, for vLLM reads it. An invalid header goes too, and does
no harm: no hop can use it. A router with spans is a hop of the trace: ``core/telemetry/request_trace.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pdcluster_router.core.apis.request_head import RequestHead

TRACE_HEADER: Final = b"traceparent"
STATE_HEADER: Final = b"tracestate"
_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_FIRST_VERSION: Final = b"00"
_NO_VERSION: Final = b"ff"
_NO_TRACE: Final = b"0" * 32
_NUM_OF_FIRST: Final = 55
"""Bytes of a ``traceparent`` of the first version. Later versions may add more behind these."""
_NO_PARENT: Final = b"0" * 16


class TraceParent(msgspec.Struct, frozen=True):
    """The caller's span, as a valid ``traceparent`` names it."""

    trace_id: str
    span_id: str
    flags: int
    """Bit 0: the caller records its span. Bit 1: the trace id is random."""


def parent_in(headers: Sequence[tuple[bytes, bytes]], fields: Mapping[bytes, bytes]) -> TraceParent | None:
    """The caller's span; None where these headers name none, or not one that is valid. ``fields``: the same by name.

    Example: ``00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01`` -> ``0af7651916cd43dd8448eb211c80319c``,
    ``b7ad6b7169203331``, 1.
    """
    given = fields.get(TRACE_HEADER)
    if given is None or sum(name == TRACE_HEADER for name, _ in headers) > 1:
        return None
    found = _PARENT.fullmatch(given.rstrip(b" \t"))  # The parser leaves what is no part of a value: RFC 9110, 5.5.
    if found is None or found[1] == _NO_VERSION or found[2] == _NO_TRACE or found[3] == _NO_PARENT:
        return None
    if found[1] == _FIRST_VERSION and found[5] is not None:
        return None  # A later version may say more at its end; the first one does not.
    return TraceParent(found[2].decode("ascii"), found[3].decode("ascii"), int(found[4], 16))


def trace_id_in(headers: Sequence[tuple[bytes, bytes]], fields: Mapping[bytes, bytes]) -> str:
    """The trace id that these headers name; empty where they name none, or not one that is valid."""
    parent = parent_in(headers, fields)
    return parent.trace_id if parent is not None else ""


def remains_of(head: RequestHead) -> RequestHead:
    """A head with the trace header alone, for a request that is refused: the rest of its memory is freed."""
    is_traced = bool(trace_id_in(head.headers, head.fields))
    headers = [(TRACE_HEADER, head.fields[TRACE_HEADER][:_NUM_OF_FIRST])] if is_traced else []
    return RequestHead(headers, dict(headers), 0, expects_continue=False, request_id=b"")
