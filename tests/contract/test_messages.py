"""vLLM's own Messages API: its request's keys against ``core/apis/messages.py``, its answers against our fake's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Final

import pytest
from pydantic import ValidationError
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from fakes.messages import MessagesWords
from fakes.reservations import PROMPT_TOKENS, reservation_of
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_reservation, to_wire
from pdcluster_router.core.apis.messages import MessagesWatch, first_event, parse_messages, unfinished
from pdcluster_router.core.apis.sse import error_of

PARAMS: Final = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)
RESERVATION: Final = parse_reservation(reservation_of(to_wire(PARAMS)))
ASKED: Final[dict[str, Any]] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
TOOLS: Final = [{"name": "f", "input_schema": {"type": "object"}}]
WORDS: Final = MessagesWords(ASKED, ["Hello", ", world"], "", None)

LOOKED_AT: Final = {
    "ec_transfer_params", "kv_transfer_params", "max_tokens", "stream", "tool_choice", "vllm_xargs",
}  # fmt: skip
HARMLESS: Final = {
    "cache_salt", "chat_template_kwargs", "messages", "metadata", "mm_payload", "model", "output_config",
    "return_mm_kwargs", "stop_sequences", "system", "temperature", "thinking", "tools", "top_k", "top_p",
    "watermarking",
}  # fmt: skip
"""What the prompt is, how the next token is chosen, how the answer is shown: both engines are told the same."""

CONVERTER: Final[AnthropicServingMessages] = object.__new__(AnthropicServingMessages)
"""Without an engine: what turns answers into this API's needs none."""


# Requests.


def test_each_key_of_vllms_requests_is_known_to_be_harmless_or_looked_at() -> None:
    assert set(AnthropicMessagesRequest.model_fields) == LOOKED_AT | HARMLESS


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True, "ec_transfer_params": {"a": 1}, "kv_transfer_params": {"do_remote_prefill": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}},
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"n": 3, "prompt": "x", "max_completion_tokens": 7},
    ],
)
def test_prefills_body_is_one_token_of_the_same_prompt_to_vllm(fields: dict[str, Any]) -> None:
    body = parse_messages(json.dumps({**ASKED, **fields}).encode())
    asked, ordered = (
        AnthropicMessagesRequest.model_validate_json(b"".join(parts))
        for parts in (body.for_decode(PARAMS), body.for_prefill(RESERVATION))
    )
    assert (ordered.max_tokens, ordered.stream, ordered.ec_transfer_params) == (1, False, None)
    assert asked.kv_transfer_params == to_wire(PARAMS)
    assert parse_reservation(ordered.kv_transfer_params) == RESERVATION
    chats = [AnthropicServingMessages.to_chat_completion_request(request) for request in (asked, ordered)]
    assert chats[0].messages == chats[1].messages
    assert chats[0].tools == chats[1].tools
    assert chats[1].n in (1, None)


def test_vllm_does_not_hold_a_thinking_budget_against_prefills_one_token_alone() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with pytest.raises(ValidationError, match="budget_tokens"):
        AnthropicMessagesRequest.model_validate({**ASKED, "max_tokens": 1, "thinking": thinking})


# Answers.


def chat_answer(finish_reason: str, *, has_tool: bool = False) -> ChatCompletionResponse:
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"stop_reason":"of a tool"}'}}
    message = {"role": "assistant", "content": None if has_tool else "Hello, world"}
    choice = {
        "index": 0,
        "message": {**message, "tool_calls": [call] if has_tool else []},
        "finish_reason": finish_reason,
    }
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 4, "total_tokens": PROMPT_TOKENS + 4}
    return ChatCompletionResponse.model_validate(
        {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage}
    )


def whole(finish_reason: str, *, has_tool: bool = False) -> bytes:
    """As ``api_router.create_messages`` writes it: JSON without spaces."""
    converted = CONVERTER.messages_full_converter(chat_answer(finish_reason, has_tool=has_tool))
    said = converted.model_dump(exclude_none=True)
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize("has_tool", [False, True])
def test_the_fakes_plain_answers_are_vllms_byte_for_byte(has_tool: bool) -> None:
    words = MessagesWords({**ASKED, "tools": TOOLS}, [], "", None) if has_tool else WORDS
    assert words.whole() == whole("tool_calls" if has_tool else "stop", has_tool=has_tool)
    assert words.one_token() == whole("length", has_tool=has_tool)
    assert words.whole_given_up() == whole("abort", has_tool=has_tool)


@pytest.mark.parametrize("has_tool", [False, True])
@pytest.mark.parametrize("finish_reason", ["stop", "length", "tool_calls"])
def test_an_answer_that_vllm_has_finished_is_whole_and_one_that_it_gave_up_is_not(
    finish_reason: str, has_tool: bool
) -> None:
    assert unfinished(whole(finish_reason, has_tool=has_tool)) == ""
    assert unfinished(whole("abort", has_tool=has_tool))


def test_an_order_for_one_named_tool_would_be_an_error_at_vllm() -> None:
    answer = chat_answer("length", has_tool=True)
    answer.choices[0].message.tool_calls[0].function.arguments = "{"
    with pytest.raises(json.JSONDecodeError):
        CONVERTER.messages_full_converter(answer)


def chat_chunk(delta: dict[str, Any], finish_reason: str | None = None, *, is_last: bool = False) -> str:
    choices = [] if is_last else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    tokens = 4 if is_last else 0
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
    return "data: " + json.dumps({"id": "chatcmpl-1", "model": "m", "choices": choices, "usage": usage}) + "\n\n"


def streamed(*chunks: str) -> list[bytes]:
    async def chat() -> AsyncGenerator[str, None]:
        for chunk in chunks:
            yield chunk

    async def converted() -> list[bytes]:
        return [event.encode() async for event in CONVERTER.message_stream_converter(chat())]

    return asyncio.run(converted())


BEGIN: Final = (chat_chunk({"role": "assistant", "content": ""}), chat_chunk({"content": "Hello"}))
DONE: Final = "data: [DONE]\n\n"


def ended(finish_reason: str) -> list[bytes]:
    last = chat_chunk({"content": ", world"}, finish_reason)
    return streamed(*BEGIN, last, chat_chunk({}, is_last=True), DONE)


def test_the_fakes_stream_is_vllms_byte_for_byte() -> None:
    assert WORDS.events() == ended("stop")
    assert WORDS.events_given_up() == ended("abort")[-3:]


@pytest.mark.parametrize("finish_reason", ["stop", "length", "tool_calls"])
def test_a_stream_that_vllm_has_finished_is_whole(finish_reason: str) -> None:
    watch = MessagesWatch()
    assert b"".join(map(watch.feed, ended(finish_reason))) == b"".join(ended(finish_reason))
    assert watch.problem_at_end() == ""


@pytest.mark.parametrize("events", [ended("abort"), streamed(*BEGIN, 'data: {"error": {"message": "died"}}\n\n', DONE)])
def test_a_stream_that_vllm_did_not_finish_is_not(events: list[bytes]) -> None:
    watch = MessagesWatch()
    for event in events:
        watch.feed(event)
    assert watch.message()
    assert watch.problem_at_end()


def test_an_error_follows_a_streams_beginning_and_nothing_else() -> None:
    begun, failed = streamed(BEGIN[0], 'data: {"error": {"message": "died"}}\n\n', DONE)
    assert first_event(begun) == (len(begun), -1)
    assert first_event(begun + failed) == (len(begun), len(begun + failed))
    assert error_of(failed) is not None


def test_an_error_before_all_else_is_an_error_event() -> None:
    (event,) = streamed('data: {"error": {"message": "died", "code": 500}}\n\n')
    error = error_of(event)
    assert error is not None
    assert error.status == 500
    assert event.startswith(b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"')


def test_the_fakes_errors_are_vllms() -> None:
    said = json.loads(translate_error_response(create_error_response(RuntimeError("it broke"))).body)
    assert json.loads(WORDS.error("it broke", 500)) == said
