"""What a fake engine says for a request of OpenAI's API: whole answers, events of a stream, and how either goes wrong.

``fakes/messages.py`` has the same for Anthropic's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from fakes.answers import error_body
from fakes.reservations import PROMPT_TOKENS

DONE = b"data: [DONE]\n\n"
GIVEN_UP = b'"finish_reason":"abort"'
_USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 4, "total_tokens": PROMPT_TOKENS + 4}
_TOOL_CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@dataclass(frozen=True)
class OpenAIWords:
    """For one request. ``receipt``: what decode says that it was pushed; None where it is not asked."""

    num_first: ClassVar[int] = 1
    """Events of a stream until its first token is told."""
    num_early: ClassVar[int] = 0
    """Events that come before the engine works."""
    cuts_errors: ClassVar[bool] = False
    """Whether a stream that goes wrong is cut, and tells no error."""

    body: dict[str, Any]
    tokens: list[str]
    padding: str
    receipt: dict[str, object] | None
    answer_id: str = "1"
    """Of the answer, behind vLLM's ``cmpl-``."""

    def whole(self) -> bytes:
        """An answer that is not streamed, byte for byte."""
        text = "".join(self.tokens) + self.padding
        common: dict[str, Any] = {"id": f"cmpl-{self.answer_id}", "created": 1, "model": "m", "usage": _USAGE}
        common["kv_transfer_params"] = self.receipt
        if "messages" not in self.body:
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
            return json.dumps({**common, "object": "text_completion", "choices": [choice]}).encode()
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.body.get("tools"):
            message = {"role": "assistant", "content": None, "tool_calls": [_TOOL_CALL]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        if self.body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}
        return json.dumps({**common, "object": "chat.completion", "choices": [choice]}).encode()

    def events(self) -> list[bytes]:
        """The events of a streamed answer, byte for byte."""
        deltas = [self._delta(token) for token in self.tokens]
        if (self.body.get("stream_options") or {}).get("include_usage"):
            deltas.append({**deltas[0], "choices": [], "usage": _USAGE})
        return [b"data: " + json.dumps(delta).encode() + b"\n\n" for delta in deltas] + [DONE]

    def one_token(self) -> bytes:
        """Prefill's answer."""
        return b'{"choices": [{"text": "x"}]}'

    def one_token_given_up(self) -> bytes:
        return b'{"choices":[{"text":"",%b}]}' % GIVEN_UP

    def whole_given_up(self) -> bytes:
        """The answer of a request that the engine has ended."""
        return _given_up(self.whole())

    def events_given_up(self) -> list[bytes]:
        """The end of a stream that the engine has ended after its first token."""
        return [_given_up(self.events()[1]), DONE]

    def error(self, message: str, code: int) -> bytes:
        return error_body(message, code)

    def error_events(self, message: str) -> list[bytes]:
        return [b"data: " + error_body(message, 500) + b"\n\n", DONE]

    def _delta(self, token: str) -> dict[str, Any]:
        common = {"id": f"cmpl-{self.answer_id}", "created": 1, "model": "m"}
        text = token + self.padding
        if "messages" in self.body:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            return {**common, "object": "chat.completion.chunk", "choices": [choice]}
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        return {**common, "object": "text_completion", "choices": [choice]}


def _given_up(answer: bytes) -> bytes:
    return answer.replace(b'"finish_reason": "stop"', GIVEN_UP).replace(b'"finish_reason": null', GIVEN_UP)
