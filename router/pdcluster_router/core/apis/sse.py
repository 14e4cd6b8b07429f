"""Server-sent events, as far as a relay must understand them: where the first one ends, and whether it is an error.

vLLM sends ``200`` and the headers of a stream before it knows whether the request will work, and an error then
comes as ``data: {"error": ...}``. Until the first event is whole nothing has gone to the client, so such an
error can still become a proper HTTP status. Later events are only searched for two marks. vLLM writes an error event
when its engine core dies, and gives its requests up when it is told to stop. In both cases it then ends the stream as
if all was well, with ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

from pdcluster_router.core.apis.openai_errors import ApiError, message_of, parse_error

MAX_FIRST_EVENT_BYTES: Final = 256 * 1024
"""A first event longer than this is no error message; it is relayed without a look."""
MAX_ERROR_EVENT_BYTES: Final = 1 << 20
"""The most bytes that are kept of the event that breaks off a stream, but for a chunk."""
_ENDLESS: Final = f"an error of more than {MAX_ERROR_EVENT_BYTES} bytes"

UNBUFFERED: Final = b"x-accel-buffering: no\r\n"
"""A header line of each stream: else an nginx in front holds tokens back."""
STREAM_LINES: Final = b"content-type: text/event-stream; charset=utf-8\r\n" + UNBUFFERED
"""The header lines of a stream whose engine has said none yet."""

_LATE_ERROR: Final = b'\ndata: {"error"'
"""How vLLM 0.32 (``entrypoints/openai/*/serving.py``) begins an error event. Inside of an answer's JSON the quotes
would be escaped, so no text that a model makes looks like this."""

_GIVEN_UP: Final = b'"finish_reason":"abort"'
"""How vLLM 0.32 (``v1/engine`` ``FinishReason.ABORT``) marks a request that it ends though its client wants more, as
when vLLM stops: the answer has status 200 and the text so far. No text that a model makes looks like this either."""
GAVE_UP: Final[Mapping[bytes, str]] = MappingProxyType({_GIVEN_UP: "it gave the request up"})
"""Bytes that mark an answer as unfinished by its engine, each with the reason that the client is told."""
NO_MARKS: Final[Mapping[bytes, str]] = MappingProxyType({})
"""For an API whose answers show otherwise, or do not show, that their engine gave them up."""

KEPT_BYTES: Final = 1024
"""How many bytes of a stream's end are kept, at least. From ``usage`` to the end of vLLM's streams are 150 to 600, the
most with metrics of each request."""
_MOST_KEPT_BYTES: Final = 2 * KEPT_BYTES
"""A kept end that is longer is cut to ``KEPT_BYTES``, so that not every chunk costs a cut."""

_BLANK_LINES: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


@dataclass(frozen=True, slots=True)
class StreamError:
    """The error object that a stream began with."""

    status: int
    body: bytes


def first_event_end(stream: bytes | bytearray) -> int:
    """How many bytes the first event has, its blank line included; -1 while it is not whole.

    Lines end with LF, CRLF or CR. Comments before the event count as part of it: they are no events.
    """
    end = 0
    while (begin := end) < len(stream):
        ends = [position + len(blank) for blank in _BLANK_LINES if (position := stream.find(blank, begin)) >= 0]
        end = min(ends, default=-1)
        if end < 0 or not _is_comment(stream[begin:end]):
            return end
    return -1


def _is_comment(block: bytes | bytearray) -> bool:
    return all(line.startswith(b":") for line in block.splitlines() if line)


def error_of(event: bytes) -> StreamError | None:
    """The error that this event tells; None: it tells none."""
    if b'"error"' not in event:
        return None
    payload = _payload_of(event)
    status = parse_error(payload)
    return None if status is None else StreamError(status, payload)


def _payload_of(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def given_up_in(answer: bytes | bytearray, marks: Mapping[bytes, str] = GAVE_UP) -> str:
    """Why the engine did not finish this answer, if these bytes say so; else empty."""
    return first_mark(answer, marks)[1]


def first_mark(answer: bytes | bytearray, marks: Mapping[bytes, str]) -> tuple[int, str]:
    """The index of the first of ``marks`` in ``answer``, and the reason that it stands for; -1 and "": there is
    none."""
    first, said = -1, ""
    for mark, why in marks.items():  # Not ``min`` of a generator, which is slower: each answer comes here.
        at = answer.find(mark)
        if at >= 0 and not 0 <= first < at:
            first, said = at, why
    return first, said


class ErrorWatch:
    """Looks for the event that breaks off a stream that has begun. One per stream. Searches each chunk once for an
    error event, and once for each mark."""

    __slots__ = ("_event", "_given_up", "_is_error_torn", "_marks", "_num_torn", "end")

    late_error: ClassVar[bytes] = _LATE_ERROR
    """A line end, and how an error event begins."""
    event_begin: ClassVar[bytes] = b"\ndata:"
    """A line end, and how any event begins."""

    def __init__(self, marks: Mapping[bytes, str] = GAVE_UP) -> None:
        self._marks = marks
        self._num_torn = max(map(len, (self.late_error, *marks)))
        """So many bytes before a chunk may be the beginning of what the chunk goes on with."""
        self._given_up = ""
        self._is_error_torn = False
        """Whether the beginning of the error event was passed on before the event was known to be an error."""
        self.end = bytearray(b"\n".rjust(self._num_torn))
        """The last bytes of the stream. It grows in place."""
        self._event: bytes | None = None

    @property
    def has_error(self) -> bool:
        """Whether an error event has begun, whole or not."""
        return self._event is not None

    @property
    def is_torn(self) -> bool:
        """Whether an event has been passed on in part: the next bytes would be taken for its rest."""
        return not self.end.endswith(_BLANK_LINES) if self._event is None else self._is_error_torn

    @property
    def is_between_events(self) -> bool:
        """Whether the passed-on bytes end with a whole event: the next bytes are then a block of their own."""
        return self._event is None and self.end.endswith(_BLANK_LINES)

    def feed(self, chunk: bytes) -> bytes:
        """The bytes of the stream that may be passed on: ``chunk`` itself, or its part before an error event."""
        if self._event is not None:
            if len(self._event) < MAX_ERROR_EVENT_BYTES:
                self._event += chunk
            return b""
        end = self.end
        begin = len(end) - self._num_torn
        end += chunk
        if end.find(self.late_error, begin) >= 0:  # Not ``in``, which has no begin.
            return self._break_off(bytes(end[begin:]), chunk)
        for mark in self._marks:
            if end.find(mark, begin) >= 0:
                return self._break_off(bytes(end[begin:]), chunk)
        if len(end) > _MOST_KEPT_BYTES:
            del end[:-KEPT_BYTES]
        return chunk

    def _break_off(self, seen: bytes, chunk: bytes) -> bytes:
        """The part of ``chunk`` before the event that breaks the stream off. ``seen``: with ``_num_torn`` bytes before
        it."""
        found = seen.find(self.late_error)
        if found < 0:
            begin, self._given_up = first_mark(seen, self._marks)
            found = seen.rfind(self.event_begin, 0, begin)
        self._event = seen[found + 1 :]
        self._is_error_torn = found + 1 < self._num_torn
        return chunk[: max(0, found + 1 - self._num_torn)]

    def message(self) -> str | None:
        """Why the engine broke off: the reason of a mark, or the message of its error event. None: the engine has not
        broken off, or that event is not whole."""
        if self._given_up:
            return self._given_up
        if self._event is None:
            return None
        if (end := first_event_end(self._event)) >= 0:
            return message_of(_payload_of(self._event[:end]))
        return _ENDLESS if len(self._event) >= MAX_ERROR_EVENT_BYTES else None

    def problem_at_end(self) -> str:
        """Why a stream that ends now is not whole; empty: it is."""
        return "an error that it did not finish" if self.has_error else ""


def error_event(error: ApiError) -> bytes:
    """One event that tells ``error`` in a stream that has begun."""
    return b"data: " + error.body() + b"\n\n"


def refusal_event(body: bytes) -> bytes:
    """One event that tells an engine's error body as it is, also one of several lines."""
    return b"".join([b"data: %b\n" % line for line in body.splitlines()]) + b"\n"
