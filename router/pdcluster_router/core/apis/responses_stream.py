"""Streams of OpenAI's Responses API: which event may be an error, and whether the last one says that the answer is
whole.

    event: response.created   event: response.in_progress   ...   event: response.completed   (or response.incomplete)

vLLM writes the first two before its engine has begun. The last event holds the whole answer, and ends every stream that
vLLM ends by itself, also of a request that the engine gave up. So that event is held back until it is here and says
that it is whole (``responses.py``). vLLM cuts the connection for any error after the head of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import orjson

from pdcluster_protocol.errors import NO_JSON
from pdcluster_router.core.apis import sse
from pdcluster_router.core.apis.messages import MAX_ANSWER_BYTES
from pdcluster_router.core.apis.openai_errors import ApiError
from pdcluster_router.core.apis.responses import NOT_WHOLE, Response
from pdcluster_router.core.apis.rewrite import Bytes
from pdcluster_router.core.apis.sse import NO_MARKS, ErrorWatch, first_event_end

_EARLY: Final = (b"event: response.created\n", b"event: response.in_progress\n")
_LAST: Final = (b"\nevent: response.completed\n", b"\nevent: response.incomplete\n")
"""vLLM writes ``incomplete`` from 0.33 on, if ``max_output_tokens`` ended the answer."""
_FIRST_OF_ALL: Final = tuple(name[1:] for name in _LAST)
_MOST_TORN: Final = max(map(len, _LAST)) - 1
_END: Final = b"\n\n"
_CUT_SHORT: Final = "its stream ended without the event response.completed"
_TOO_LONG: Final = f"the event response.completed is longer than {MAX_ANSWER_BYTES} bytes"


def first_event(stream: Bytes) -> tuple[int, int]:
    """Begin and end of the first event that may be an error; the end is -1 while that event is not whole."""
    begin = 0
    for name in _EARLY:
        if not stream.startswith(name, begin):
            break
        if (end := stream.find(_END, begin)) < 0:
            return begin, -1
        begin = end + len(_END)
    length = first_event_end(stream[begin:])
    return begin, (begin + length if length >= 0 else -1)


def gives_up(event: bytes) -> str:
    """Why a stream that has this event before all text is no whole answer; empty: the event is another one."""
    return _problem_of(event) if event.startswith(_FIRST_OF_ALL) else ""


class ResponsesWatch(ErrorWatch):
    """Holds the last event of a stream back until it is whole, and says that the answer is."""

    __slots__ = ("_is_whole", "_last", "_num_passed", "_problem")

    late_error = b"\nevent: error"
    event_begin = b"\nevent:"

    def __init__(self, marks: Mapping[bytes, str] = NO_MARKS) -> None:
        super().__init__(marks)
        self._last: bytearray | None = None
        """The last event, as far as it has come."""
        self._num_passed = 0
        """Bytes of it that were passed on before it was known."""
        self._is_whole = False
        self._problem = ""

    @property
    def is_torn(self) -> bool:
        return self._num_passed > 0 if self._last is not None else super().is_torn

    def feed(self, chunk: bytes) -> bytes:
        before = bytes(self.end[-_MOST_TORN:])
        passed = super().feed(chunk)
        if self._is_whole:
            return passed
        if self._last is not None:
            return self._grown(passed)
        seen = before + passed
        found = [at for at in map(seen.find, _LAST) if at >= 0]
        if not found:
            return passed
        begin = min(found) + 1
        self._last, self._num_passed = bytearray(), max(0, len(before) - begin)
        return passed[: max(0, begin - len(before))] + self._grown(seen[begin:])

    def message(self) -> str | None:
        return self._problem or super().message()

    def problem_at_end(self) -> str:
        return self._problem or super().problem_at_end() or ("" if self._is_whole else _CUT_SHORT)

    def _grown(self, more: bytes) -> bytes:
        """The last event and what follows it, if it is here and whole; else nothing is passed on."""
        last = self._last
        assert last is not None
        begin = max(0, len(last) - 1)
        last += more
        end = last.find(_END, begin)
        if end < 0:
            self._problem = _TOO_LONG if len(last) > MAX_ANSWER_BYTES else ""
            return b""
        self._problem = _problem_of(last[:end])
        if self._problem:
            return b""
        self._is_whole, self._last = True, None
        return bytes(last[self._num_passed :])


class _LastEvent(msgspec.Struct):
    response: Response


def _problem_of(event: Bytes) -> str:
    """Why the answer that this event holds is not whole; empty: it is."""
    data = event.partition(b"\ndata:")[2]
    try:
        return _LAST_EVENT.decode(data).response.problem
    except NO_JSON:
        return NOT_WHOLE


def error_event(error: ApiError) -> bytes:
    """One event that tells ``error`` in a stream that has begun: as OpenAI's API has it, with the error object in it
    that SDKs look for in any event."""
    said = {"type": "error", "code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
    return b"event: error\ndata: %b\n\n" % orjson.dumps({**said, **orjson.loads(error.body())})


def refusal_event(body: bytes) -> bytes:
    """One event that tells an engine's error body as it is."""
    return b"event: error\n" + sse.refusal_event(body)


_LAST_EVENT: Final = msgspec.json.Decoder(_LastEvent)
