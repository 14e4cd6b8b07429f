"""What a fake engine says for a request of OpenAI's Responses API, as vLLM 0.32 does.

``tests/contract/test_responses.py`` holds it against vLLM's own classes.
"""

from __future__ import annotations

import json
from typing import Any

from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS
from fakes.words import OpenAIWords

RESPONSES = "/v1/responses"
_USAGE = {
    "input_tokens": PROMPT_TOKENS,
    "input_tokens_details": {
        "cached_tokens": CACHED_TOKENS, "cache_write_tokens": 0, "input_tokens_per_turn": [],
        "cached_tokens_per_turn": [],
    },
    "output_tokens": 4,
    "output_tokens_details": {
        "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": [],
    },
    "total_tokens": PROMPT_TOKENS + 4,
}  # fmt: skip


class ResponsesWords(OpenAIWords):
    """For one request. An answer says that it is whole if the router wants that, and it is."""

    num_first, num_early = 3, 2
    cuts_errors = True

    @property
    def text(self) -> str:
        return "".join(self.tokens) + self.padding

    def whole(self) -> bytes:
        return _json(self._response("completed"))

    def events(self) -> list[bytes]:
        return [*self._early(), *map(self._delta_of, self.tokens), *self.last("response.completed", "completed")]

    def one_token(self) -> bytes:
        return _json(self._response("incomplete"))

    def one_token_given_up(self) -> bytes:
        return self.whole_given_up()

    def whole_given_up(self) -> bytes:
        return _json(self._response("completed", is_whole=False))

    def events_given_up(self) -> list[bytes]:
        return self.last("response.completed", "completed", is_whole=False)

    def error_events(self, message: str) -> list[bytes]:
        """Of other engines of this API: vLLM cuts the connection instead."""
        return [_event({"type": "error", "error": {"message": message, "code": 500, "type": "InternalServerError"}})]

    def last(self, name: str, status: str, *, is_whole: bool = True) -> list[bytes]:
        response = self._response(status, is_whole=is_whole)
        return [_event({"response": response, "sequence_number": 9, "type": name})]

    def _early(self) -> list[bytes]:
        response = {**self._response("in_progress", is_whole=False), "output": [], "usage": None}
        names = ("response.created", "response.in_progress")
        return [
            _event({"response": response, "sequence_number": index, "type": name}) for index, name in enumerate(names)
        ]

    def _delta_of(self, token: str) -> bytes:
        common = {"content_index": 0, "item_id": "msg_1", "output_index": 0, "sequence_number": 4}
        return _event({**common, "delta": token + self.padding, "logprobs": [], "type": "response.output_text.delta"})

    def _response(self, status: str, *, is_whole: bool = True) -> dict[str, Any]:
        text: dict[str, Any] = {"annotations": [], "text": self.text, "type": "output_text", "logprobs": None}
        message = {"id": "msg_1", "content": [text], "role": "assistant", "status": "completed", "type": "message"}
        is_wanted = (self.body.get("kv_transfer_params") or {}).get("wants_whole") is True
        said = {**(self.receipt or {}), "pdcluster_is_whole": True} if is_whole and is_wanted else self.receipt
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self.answer_id}", "created_at": 1, "incomplete_details": details,
            "instructions": self.body.get("instructions"),
            "metadata": None, "model": "m", "object": "response", "output": [{**message, "phase": None}],
            "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "none", "tools": [], "top_p": 1.0,
            "background": False, "max_output_tokens": 9, "max_tool_calls": None, "previous_response_id": None,
            "prompt": None, "reasoning": None, "service_tier": "auto", "status": status, "text": None,
            "top_logprobs": None, "truncation": "disabled", "usage": _USAGE, "user": None, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "kv_transfer_params": said, "ec_transfer_params": None, "input_messages": None,
            "output_messages": None,
        }  # fmt: skip


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + b"data: " + _json(data) + b"\n\n"


def _json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
