"""The client's body, and the two bodies made of it: decode's and prefill's.

The only file that names keys of an OpenAI request (vLLM 0.32 ``entrypoints/openai/*/protocol.py``).
Decode gets all that the client sent, with our transfer parameters for whatever it sent as such. Prefill gets
the same prompt but makes one token and does not stream. Answers are never rewritten: they go back as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import orjson

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.params import DecodeParams, Reservation, to_wire

DEFAULT_OUTPUT_TOKENS: Final = 256
"""What an answer without a limit counts for when engines are compared."""

_BYTES_PER_TOKEN: Final = 4
_PARAMS: Final = "kv_transfer_params"


class BadBody(ProtocolError):
    """The client's body cannot be a request. The message says why, in the client's words."""


@dataclass(frozen=True, slots=True)
class ClientBody:
    """A request body, parsed once. ``_fields`` are the client's own and stay as they came."""

    _fields: dict[str, object]
    num_bytes: int

    @property
    def is_stream(self) -> bool:
        return self._fields.get("stream") is True

    @property
    def needs_local_prefill(self) -> bool:
        """Whether decode must prefill by itself: several sequences, or facts that only its own prefill yields."""
        fields = self._fields
        return (
            _is_above_one(fields.get("n"))
            or _is_above_one(fields.get("best_of"))
            or fields.get("use_beam_search") is True
            or fields.get("prompt_logprobs") is not None
            or (fields.get("echo") is True and fields.get("logprobs") is not None)
            or fields.get("prompt_embeds") is not None
            or _is_prompt_list(fields.get("prompt"))
        )

    @property
    def estimated_prompt_tokens(self) -> int:
        """About how many tokens there are to prefill, at least 1. An estimate: nothing is tokenized here."""
        return self.num_bytes // _BYTES_PER_TOKEN or 1

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens this will cost, prompt and answer. An estimate: nothing is tokenized here."""
        limit = self._fields.get("max_completion_tokens") or self._fields.get("max_tokens")
        output = limit if isinstance(limit, int) and limit > 0 else DEFAULT_OUTPUT_TOKENS
        return self.num_bytes // _BYTES_PER_TOKEN + output

    def for_decode(self, params: DecodeParams | None) -> bytes:
        """Decode's body. None: no transfer, decode prefills by itself.

        Raises:
            BadBody: The body cannot be written as JSON again.
        """
        fields = {key: value for key, value in self._fields.items() if key != _PARAMS}
        if params is not None:
            fields[_PARAMS] = to_wire(params)
        return _encode(fields)

    def for_prefill(self, reservation: Reservation) -> bytes:
        """Prefill's body: the same prompt, one token, not streamed, and where the KV goes.

        Raises:
            BadBody: The body cannot be written as JSON again.
        """
        fields = {**self._fields, "stream": False, "max_tokens": 1, "min_tokens": 1, _PARAMS: to_wire(reservation)}
        fields.pop("stream_options", None)
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        return _encode(fields)


def parse_body(raw: bytes) -> ClientBody:
    """The client's request body.

    Raises:
        BadBody: It is not a JSON object.
    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"the request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadBody(f"the request body is a JSON {_json_type(fields)}, not an object")
    return ClientBody(fields, len(raw))


def _encode(fields: dict[str, object]) -> bytes:
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:
        # orjson reads deeper nesting (1024) than it writes (254).
        raise BadBody(f"the request body cannot be passed on: {error}") from error


def _is_above_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _is_prompt_list(prompt: object) -> bool:
    """Several strings or token lists. A list of ints is one tokenized prompt."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
