"""What a fake engine says for a request of Anthropic's Messages API, as vLLM 0.32 does (``entrypoints/anthropic``).

``tests/contract/test_messages.py`` holds it against vLLM's own converter and a real engine.
"""

from __future__ import annotations

import json
from typing import Any

from fakes.reservations import PROMPT_TOKENS
from fakes.words import OpenAIWords

MESSAGES = "/v1/messages"
_USAGE = {"input_tokens": PROMPT_TOKENS, "output_tokens": 4}
_TOOL_USE = {"type": "tool_use", "id": "call-1", "name": "f", "input": {"stop_reason": "of a tool"}}


class MessagesWords(OpenAIWords):
    """For one request."""

    num_first = 3

    def whole(self) -> bytes:
        return _json(self._answer("tool_use" if self.body.get("tools") else "end_turn"))

    def events(self) -> list[bytes]:
        start: dict[str, Any] = {
            "id": "chatcmpl-1", "type": "message", "role": "assistant", "content": [], "model": "m",
            "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": PROMPT_TOKENS, "output_tokens": 0},
        }  # fmt: skip
        deltas = [{"type": "text_delta", "text": token + self.padding} for token in self.tokens]
        return [
            _event({"type": "message_start", "message": start}),
            _event({"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}),
            *(_event({"type": "content_block_delta", "delta": delta, "index": 0}) for delta in deltas),
            *_end("end_turn"),
        ]

    def one_token(self) -> bytes:
        return _json(self._answer("max_tokens"))

    def one_token_given_up(self) -> bytes:
        return self.whole_given_up()

    def whole_given_up(self) -> bytes:
        return _json(self._answer(None))

    def events_given_up(self) -> list[bytes]:
        return _end(None)

    def error(self, message: str, code: int) -> bytes:
        return _json({"type": "error", "error": {"type": "InternalServerError", "message": message}})

    def error_events(self, message: str) -> list[bytes]:
        return [_event({"type": "error", "error": {"type": "internal_error", "message": message}})]

    def _answer(self, stop_reason: str | None) -> dict[str, Any]:
        """Without what is null, as vLLM writes it."""
        text = {"type": "text", "text": "".join(self.tokens) + self.padding}
        said = {
            "id": "chatcmpl-1", "type": "message", "role": "assistant",
            "content": [_TOOL_USE if self.body.get("tools") else text], "model": "m", "stop_reason": stop_reason,
            "usage": _USAGE, "kv_transfer_params": self.receipt,
        }  # fmt: skip
        return {key: value for key, value in said.items() if value is not None}


def _end(stop_reason: str | None) -> list[bytes]:
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    usage = _USAGE
    return [
        _event({"type": "content_block_stop", "index": 0}),
        _event({"type": "message_delta", "delta": delta, "usage": usage}),
        _event({"type": "message_stop"}),
    ]


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + b"data: " + _json(data) + b"\n\n"


def _json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
