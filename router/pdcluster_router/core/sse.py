"""Server-sent events, as far as a relay must understand them: where the first one ends, and whether it is an error.

vLLM sends ``200`` and the headers of a stream before it knows whether the request will work, and an error then
comes as ``data: {"error": ...}``. Until the first event is whole nothing has gone to the client, so such an
error can still become a proper HTTP status. Everything after the first event is relayed unread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdcluster_router.core.openai_errors import ApiError, parse_error

MAX_FIRST_EVENT_BYTES: Final = 256 * 1024
"""A first event longer than this is no error message; it is relayed without a look."""

_BLANK_LINES: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


@dataclass(frozen=True, slots=True)
class StreamError:
    """The error object that a stream began with."""

    status: int
    body: bytes


def first_event_end(stream: bytes) -> int:
    """How many bytes the first event has, its blank line included; -1 while it is not whole.

    Lines end with LF, CRLF or CR.
    """
    ends = [position + len(blank) for blank in _BLANK_LINES if (position := stream.find(blank)) >= 0]
    return min(ends, default=-1)


def error_of(event: bytes) -> StreamError | None:
    """The error in this event, if it is one."""
    if b'"error"' not in event:
        return None
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    payload = b"\n".join(lines)
    status = parse_error(payload)
    return None if status is None else StreamError(status, payload)


def error_event(error: ApiError) -> bytes:
    """One event that tells ``error`` in a stream that has begun."""
    return b"data: " + error.body() + b"\n\n"
