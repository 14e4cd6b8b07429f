"""Makes one answer of the answers to a request's parts: the same that vLLM gives to the whole (vLLM 0.32,
``entrypoints/openai/*/serving.py``).

    part 0   {"id":"cmpl-R-0",... "choices":[{"index":0,...}]}      {"id":"cmpl-R",...
    part 1   {"id":"cmpl-R-1",... "choices":[{"index":0,...}]}  ->   "choices":[{"index":0,...},{"index":1,...}]}

A choice gets the number of its part, and keeps all other bytes. All events have the same ``id`` and ``created``. The
tokens of a prompt count once, those of answers add up. A stream has the parts' events as they come, then one event with
``usage`` if the parts have such events, then one ``[DONE]``. Knows no connection and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import msgspec

from pdcluster_protocol.errors import NO_JSON, ProtocolError
from pdcluster_router.core.apis.rewrite import Bytes

MAX_EVENT_BYTES: Final = 16 << 20
"""A longer event of a stream fails its request. With log probabilities of a whole vocabulary an event has some MiB."""
DONE: Final = b"data: [DONE]\n\n"
_END: Final = b"\n\n"
_DATA: Final = b"data:"
_LAST: Final = b"[DONE]"

Fields: TypeAlias = dict[str, msgspec.Raw]
"""A JSON object: its keys in their order, their values byte for byte."""


class BadAnswer(ProtocolError):
    """An engine's answer to a part is not one choice of a completion."""


@dataclass(frozen=True, slots=True)
class Naming:
    """How a request is divided, and what its parts are called."""

    request_id: str
    num_parts: int
    num_choices: int
    """Choices of each prompt."""

    def part_id(self, part: int) -> str:
        """The request id of one part."""
        return f"{self.request_id}-{part}"

    def answer_id(self, part: int, raw: msgspec.Raw) -> msgspec.Raw:
        """The ``id`` of the whole answer: vLLM ends it with the request's id, so a part's ``cmpl-R-0`` becomes
        ``cmpl-R``."""
        text, ours = _decoded(_TEXT, raw), self.part_id(part)
        whole = text.removesuffix(ours) + self.request_id if text.endswith(ours) else text
        return msgspec.Raw(msgspec.json.encode(whole))


def merged(naming: Naming, answers: Sequence[Bytes]) -> bytes:
    """The whole answer, made of the answers to all parts, in the order of the parts and not streamed.

    Raises:
        BadAnswer: One of ``answers`` is no completion with one choice.
    """
    wholes = [_decoded(_OBJECT, answer) for answer in answers]
    usages = [_value(whole, "usage") for whole in wholes]
    ours: dict[str, object] = {
        "id": naming.answer_id(0, _value(wholes[0], "id")),
        "choices": [_numbered(whole, part) for part, whole in enumerate(wholes)],
        "usage": _merged_usage(naming, usages, usages[-1]),
    }
    if "metrics" in wholes[0]:
        ours["metrics"] = None  # Metrics are about one sequence.
    return msgspec.json.encode({**wholes[0], **ours})


class StreamMerge:
    """The whole stream of a request. One owner, who may call ``feed`` and ``end`` for the parts in any order."""

    __slots__ = ("_common", "_done", "_first", "_held", "_naming", "_num_left", "_usages")

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._held = [bytearray() for _ in range(naming.num_parts)]
        self._num_left = naming.num_parts
        self._done: set[int] = set()
        """The parts whose engine has said ``[DONE]``."""
        self._first = 0
        """The part that had the first event."""
        self._common: Fields = {}
        """The ``id`` and ``created`` that every event gets: those of the first event, with the whole request's id."""
        self._usages: dict[int, Fields] = {}
        """The event of each part that tells usage."""

    def feed(self, part: int, chunk: bytes) -> bytes:
        """``chunk`` has come from ``part``. Returns the next bytes of the whole stream, in whole events.

        Raises:
            BadAnswer: The bytes of ``part`` are no stream of completions, or one event is too long.
        """
        held = self._held[part]
        looked_at = max(0, len(held) - 1)
        held += chunk
        if held.find(_END, looked_at) < 0:
            if len(held) > MAX_EVENT_BYTES:
                raise BadAnswer(f"one event of its stream has more than {MAX_EVENT_BYTES} bytes")
            return b""
        *events, rest = bytes(held).split(_END)
        self._held[part] = bytearray(rest)
        return b"".join([self._event(part, event) for event in events])

    def end(self, part: int) -> bytes:
        """One part has ended. Returns the end of the whole stream (usage and ``[DONE]``) for the last part, else
        nothing.

        Raises:
            BadAnswer: The part has ended within an event or without ``[DONE]``, or it is the last one and only some
                parts tell usage.
        """
        if self._held[part]:
            raise BadAnswer("its stream ended within an event")
        if part not in self._done:
            raise BadAnswer("its stream ended without its [DONE]")
        self._num_left -= 1
        return b"" if self._num_left else self._usage() + DONE

    def _event(self, part: int, event: bytes) -> bytes:
        lines = [line[len(_DATA) :] for line in event.split(b"\n") if line.startswith(_DATA)]
        if not lines:
            return _comment(event)
        if lines[0].strip() == _LAST:
            self._done.add(part)
            return b""
        fields = _decoded(_OBJECT, b"\n".join(lines))
        if not _decoded(_LIST, _value(fields, "choices")):
            self._usages[part] = fields
            return b""
        if not self._common:
            self._first = part
            self._common = {
                "id": self._naming.answer_id(part, _value(fields, "id")),
                "created": _value(fields, "created"),
            }
        return _written({**fields, **self._common, "choices": [_numbered(fields, part)]})

    def _usage(self) -> bytes:
        if not self._usages:
            return b""
        usages = [_value(self._usages.get(part, {}), "usage") for part in range(self._naming.num_parts)]
        fields = self._usages[self._first]
        fields.pop("metrics", None)  # Metrics are about one sequence.
        return _written({**fields, **self._common, "usage": _merged_usage(self._naming, usages, fields["usage"])})


def _comment(block: bytes) -> bytes:
    if not all(line.startswith(b":") for line in block.split(b"\n") if line):
        raise BadAnswer("its stream has lines that are no event")
    return block + _END


def _written(event: dict[str, object]) -> bytes:
    return b"%b %b%b" % (_DATA, msgspec.json.encode(event), _END)


def _numbered(fields: Fields, part: int) -> dict[str, object]:
    """The one choice in ``fields``, with the number of its part."""
    choices = _decoded(_CHOICES, _value(fields, "choices"))
    if len(choices) != 1:
        raise BadAnswer(f"it has {len(choices)} choices, and was asked for one")
    return {**choices[0], "index": part}


class _PartReasoning(msgspec.Struct):
    reasoning_tokens: int = 0


class _PartUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    completion_tokens_details: _PartReasoning | None = None


def _merged_usage(naming: Naming, usages: Sequence[msgspec.Raw], details: msgspec.Raw) -> dict[str, object]:
    """The usage of all parts. ``details``: one part's usage; its other keys are kept, such as the number of cached
    tokens."""
    told = [_decoded(_USAGE, usage) for usage in usages]
    num_prompt = sum(usage.prompt_tokens for usage in told[:: naming.num_choices])
    num_answer = sum(usage.completion_tokens or 0 for usage in told)
    sums: dict[str, object] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
    }
    reasoning = [usage.completion_tokens_details for usage in told if usage.completion_tokens_details is not None]
    if reasoning:
        sums["completion_tokens_details"] = {"reasoning_tokens": sum(one.reasoning_tokens for one in reasoning)}
    fields = _decoded(_OBJECT, details)
    return {**fields, **sums}


_D = TypeVar("_D")


def _decoded(decoder: msgspec.json.Decoder[_D], raw: Bytes | msgspec.Raw) -> _D:
    try:
        return decoder.decode(raw)
    except NO_JSON as error:
        raise BadAnswer("its answer is no completion") from error


def _value(fields: Fields, key: str) -> msgspec.Raw:
    if key not in fields:
        raise BadAnswer(f"its answer has no {key}")
    return fields[key]


_OBJECT: Final = msgspec.json.Decoder(Fields)
_CHOICES: Final = msgspec.json.Decoder(list[Fields])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_USAGE: Final = msgspec.json.Decoder(_PartUsage)
