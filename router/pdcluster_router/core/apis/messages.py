"""Anthropic's Messages API as vLLM speaks it (0.23 to 0.33, ``entrypoints/anthropic``): bodies, whole answers, streams.

    client    {"max_tokens": 99, "messages": [...], ...}
    prefill   {"max_tokens": 99, "messages": [...], ... ,"stream":false,"max_tokens":1,"kv_transfer_params":{...}}

vLLM turns such a request into a chat completion. When its engine gives the request up, the answer does not say so: it
has status 200, a clean end, and no ``stop_reason``. So the router takes an answer for whole only if it says why it
ended. Keys that only OpenAI's API has, as ``n``, mean nothing in a request of this API.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from pdcluster_protocol.errors import NO_JSON
from pdcluster_router.core.apis.estimate import estimate_prompt_tokens
from pdcluster_router.core.apis.rewrite import ABSENT, TRUE_FORMS, BadBody, Bytes, ClientBody, Said, count_in, scanned
from pdcluster_router.core.apis.sse import ErrorWatch, first_event_end

MAX_ANSWER_BYTES: Final = 64 << 20
"""An answer that is not streamed is kept until its end; a longer one fails. A million tokens are about 5 MiB."""

NO_REASON: Final = "it gave the request up: its answer has no stop_reason"
_GIVEN_UP: Final = b'"delta":{"stop_reason":null'
_WHOLE: Final = b'"delta":{"stop_reason":"'
"""``message_delta`` has one of these two near a stream's end. Text and a tool's input come as JSON strings, with quotes
escaped. ``message_start`` has a ``stop_reason`` of null too, but not in a ``delta``."""
GAVE_UP: Final[Mapping[bytes, str]] = MappingProxyType({_GIVEN_UP: NO_REASON})
_START: Final = b"event: message_start\n"
_ONE_TOKEN: Final = b'"stream":false,"max_tokens":1'
_ANY_TOOL: Final = b'"tool_choice":{"type":"any"}'
"""In prefill's body this replaces a named tool, whose arguments vLLM reads as JSON: one token of them is not JSON."""
MAX_CHOICE_BYTES: Final = 64 << 10
"""The most bytes of a ``tool_choice``, which is scanned a second time: plenty for the name of a tool."""


class MessagesSaid(Said):
    """The keys of ``Said``, and one that matters only in this API."""

    tool_choice: msgspec.Raw = ABSENT


class MessagesBody(ClientBody, frozen=True):
    """A request of the Messages API, scanned once."""

    _for_one_token: tuple[bytes, ...]
    """Keys for prefill that replace the client's."""

    @property
    def needs_local_prefill(self) -> bool:
        """False: each request is one sequence, and none asks for facts of its prompt."""
        return False

    @property
    def max_answer_tokens(self) -> int | None:
        return count_in(self._said.max_tokens) or None

    def _one_token(self) -> list[bytes]:
        return [*self._for_one_token, _ONE_TOKEN]


class _ToolChoice(msgspec.Struct):
    type: str


class _Whole(msgspec.Struct):
    """The key that a whole answer has; all else is skipped."""

    stop_reason: str


def parse_messages(raw: Bytes) -> MessagesBody:
    """The client's request body, scanned. ``raw`` must not change from now on.

    Raises:
        BadBody: It is not a JSON object, its ``tool_choice`` is too long, or its ``vllm_xargs`` names transfer
            parameters.
    """
    begin, said = scanned(raw, _SAID)
    ours = [b'"ec_transfer_params":null'] if said.ec_transfer_params is not ABSENT else []
    if _names_a_tool(said.tool_choice):
        ours.append(_ANY_TOOL)
    is_stream, num_tokens = bytes(said.stream) in TRUE_FORMS, estimate_prompt_tokens(raw)
    return MessagesBody(raw, begin, raw.rindex(b"}"), said, is_stream, num_tokens, said.model, b"", tuple(ours))


def first_event(stream: Bytes) -> tuple[int, int]:
    """Begin and end of the first event that may be an error; the end is -1 while that event is not whole.

    vLLM writes ``message_start`` before it looks for an error, so the event after ``message_start`` decides.
    """
    end = first_event_end(stream)
    if end < 0 or not stream.startswith(_START):
        return 0, end
    length = first_event_end(stream[end:])
    return end, (end + length if length >= 0 else -1)


def unfinished(answer: Bytes) -> str:
    """Why an answer that is not streamed is not whole; empty: it is whole. Prefill's answer of one token comes here
    too."""
    try:
        _ANSWER.decode(answer)
    except NO_JSON:
        return NO_REASON
    return ""


class MessagesWatch(ErrorWatch):
    """Looks for the event that breaks off a stream, and for the one that says why the answer ended."""

    __slots__ = ("_is_whole",)

    late_error = b"\nevent: error"
    event_begin = b"\nevent:"

    def __init__(self, marks: Mapping[bytes, str] = GAVE_UP) -> None:
        super().__init__(marks)
        self._is_whole = False

    def feed(self, chunk: bytes) -> bytes:
        self._is_whole = self._is_whole or _WHOLE in self.end[-self._num_torn :] + chunk
        return super().feed(chunk)

    def problem_at_end(self) -> str:
        return super().problem_at_end() or ("" if self._is_whole else "its stream ended without a stop_reason")


def _names_a_tool(tool_choice: msgspec.Raw) -> bool:
    """Whether the client demands one tool by its name. Raises: BadBody: ``tool_choice`` is too long."""
    if tool_choice is ABSENT:
        return False
    if (num_bytes := len(memoryview(tool_choice))) > MAX_CHOICE_BYTES:
        raise BadBody(f"tool_choice has {num_bytes} bytes, and {MAX_CHOICE_BYTES} are the most: name one tool in it")
    try:
        return _TOOL_CHOICE.decode(tool_choice).type == "tool"
    except (msgspec.ValidationError, UnicodeDecodeError):
        return False  # It is null, or nothing that vLLM takes.


_SAID: Final = msgspec.json.Decoder(MessagesSaid)
_ANSWER: Final = msgspec.json.Decoder(_Whole)
_TOOL_CHOICE: Final = msgspec.json.Decoder(_ToolChoice)
