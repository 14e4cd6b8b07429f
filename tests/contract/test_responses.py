"""vLLM's own Responses API: its request's keys against ``core/apis/responses.py``, its answers against our fake's."""

from __future__ import annotations

import json
from typing import Any, Final, cast

import pytest
from openai.types.responses import ResponseOutputMessage, ResponseOutputText
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.serving import extract_tool_types
from vllm.sampling_params import SamplingParams

from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS, reservation_of
from fakes.responses import ResponsesWords
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_decode_params, parse_reservation, to_wire
from pdcluster_router.core.apis.responses import parse_responses, unfinished
from pdcluster_router.core.apis.responses_stream import ResponsesWatch
from pdcluster_router.core.apis.rewrite import BadBody

PARAMS: Final = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)
RESERVATION: Final = parse_reservation(reservation_of(to_wire(PARAMS)))
ASKED: Final[dict[str, Any]] = {"model": "m", "max_output_tokens": 9, "input": "a"}
TOOLS: Final = [{"type": "function", "name": "f", "strict": False, "parameters": {"type": "object"}}]
WORDS: Final = ResponsesWords({"kv_transfer_params": {"wants_whole": True}}, ["Hello", ", world"], "", None)

LOOKED_AT: Final = {
    "background", "ec_transfer_params", "kv_transfer_params", "max_output_tokens", "previous_response_id", "stop",
    "store", "stream", "tools", "vllm_xargs",
}  # fmt: skip
HARMLESS: Final = {
    "cache_salt", "chat_template_kwargs", "enable_response_messages", "frequency_penalty", "ignore_eos", "include",
    "include_reasoning", "include_stop_str_in_output", "input", "instructions", "logit_bias", "max_tool_calls",
    "media_io_kwargs", "metadata", "min_p", "mm_payload", "mm_processor_kwargs", "model", "parallel_tool_calls",
    "presence_penalty", "previous_input_messages", "priority", "prompt", "prompt_cache_key", "reasoning",
    "repetition_penalty", "request_id", "return_mm_kwargs", "seed", "service_tier", "session_id",
    "skip_special_tokens", "stop_token_ids", "structured_outputs", "temperature", "text", "tool_choice", "top_k",
    "top_logprobs", "top_p", "truncation", "user", "watermarking",
}  # fmt: skip
"""What the prompt is, how the next token is chosen, how the answer is shown: both engines are told the same."""


# Requests.


def test_each_key_of_vllms_requests_is_known_to_be_harmless_or_looked_at() -> None:
    assert set(ResponsesRequest.model_fields) == LOOKED_AT | HARMLESS


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True, "ec_transfer_params": {"a": 1}, "kv_transfer_params": {"do_remote_prefill": True}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "instructions": "b"},
        {"background": False, "previous_response_id": None, "stop": [], "store": True},
    ],
)
def test_prefills_body_is_one_token_of_the_same_prompt_to_vllm(fields: dict[str, Any]) -> None:
    body = parse_responses(json.dumps({**ASKED, **fields}).encode())
    asked, ordered = (
        ResponsesRequest.model_validate_json(b"".join(parts))
        for parts in (body.for_decode(PARAMS), body.for_prefill(RESERVATION))
    )
    assert (ordered.max_output_tokens, ordered.stream, ordered.ec_transfer_params) == (1, False, None)
    assert (asked.store, ordered.store) == (False, False)
    assert parse_decode_params(asked.kv_transfer_params).wants_whole is True
    assert parse_reservation(ordered.kv_transfer_params).wants_whole is True
    assert ordered.to_sampling_params(99).extra_args == {"kv_transfer_params": ordered.kv_transfer_params}
    assert (asked.input, asked.instructions, asked.tools) == (ordered.input, ordered.instructions, ordered.tools)


@pytest.mark.parametrize(
    "tool", [{"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "web_search_preview"}]
)
def test_a_tool_that_vllm_would_call_by_itself_is_refused(tool: dict[str, Any]) -> None:
    raw = json.dumps({**ASKED, "tools": [tool]}).encode()
    assert extract_tool_types(ResponsesRequest.model_validate_json(raw).tools) == {tool["type"]}
    with pytest.raises(BadBody, match=f"type {tool['type']}"):
        parse_responses(raw)


# Answers.


def response(status: str, params: dict[str, object] | None, *, is_empty: bool = False) -> ResponsesResponse:
    text = ResponseOutputText(text="Hello, world", annotations=[], type="output_text")
    message = ResponseOutputMessage(id="msg_1", content=[text], role="assistant", status="completed", type="message")
    usage = ResponseUsage(
        input_tokens=PROMPT_TOKENS,
        input_tokens_details=InputTokensDetails(cached_tokens=CACHED_TOKENS, cache_write_tokens=0),
        output_tokens=4,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=PROMPT_TOKENS + 4,
    )
    request = ResponsesRequest.model_validate({**ASKED, "request_id": "resp_1"})
    made = ResponsesResponse.from_request(
        request,
        SamplingParams(max_tokens=9),
        model_name="m",
        created_time=1,
        output=[] if is_empty else [message],
        status=cast("Any", status),
        usage=None if is_empty else usage,
        kv_transfer_params=params,
    )
    return cast("ResponsesResponse", made)


IS_WHOLE: Final[dict[str, object]] = {"pdcluster_is_whole": True}


def written(one: ResponsesResponse) -> bytes:
    """As ``api_router.create_responses`` writes it: JSON without spaces."""
    return json.dumps(one.model_dump(mode="json", by_alias=True), ensure_ascii=False, separators=(",", ":")).encode()


def event(name: str, kind: Any, one: ResponsesResponse, number: int) -> bytes:
    """As ``api_router._convert_stream_to_sse_events`` writes it."""
    made = kind(type=name, sequence_number=number, response=one)
    return f"event: {name}\ndata: {made.model_dump_json(indent=None, by_alias=True)}\n\n".encode()


def test_the_fakes_plain_answers_are_vllms_byte_for_byte() -> None:
    assert WORDS.whole() == written(response("completed", IS_WHOLE))
    assert WORDS.one_token() == written(response("incomplete", IS_WHOLE))
    assert WORDS.whole_given_up() == written(response("completed", None))


def test_the_events_of_the_fake_that_hold_an_answer_are_vllms() -> None:
    early, last = response("in_progress", None, is_empty=True), response("completed", IS_WHOLE)
    assert WORDS.events()[:2] == [
        event("response.created", ResponseCreatedEvent, early, 0),
        event("response.in_progress", ResponseInProgressEvent, early, 1),
    ]
    assert WORDS.events()[-1] == event("response.completed", ResponseCompletedEvent, last, 9)


@pytest.mark.parametrize("status", ["completed", "incomplete"])
@pytest.mark.parametrize("params", [None, IS_WHOLE, {}])
def test_an_answer_is_whole_where_its_parameters_say_so(status: str, params: dict[str, object] | None) -> None:
    one, watch = response(status, params), ResponsesWatch()
    assert (unfinished(written(one)) == "") is (params is IS_WHOLE)
    watch.feed(event("response.completed", ResponseCompletedEvent, one, 9))
    assert (watch.problem_at_end() == "") is (params is IS_WHOLE)
