"""vLLM's own request models against ``core/apis/rewrite.py``: which keys there are, and what odd values mean."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from fakes.reservations import reservation_of
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_reservation, to_wire
from pdcluster_router.core.apis.openai_errors import model_not_found
from pdcluster_router.core.apis.rewrite import PREFILLED_APART, Said, parse_body

PARAMS: Final = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)
RESERVATION: Final = parse_reservation(reservation_of(to_wire(PARAMS)))
Model = type[CompletionRequest] | type[ChatCompletionRequest]
MODELS: Final[list[Model]] = [CompletionRequest, ChatCompletionRequest]

SAMPLING: Final = {
    "allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "length_penalty",
    "logit_bias", "min_p", "presence_penalty", "repetition_detection", "repetition_penalty", "response_format", "seed",
    "stop", "stop_token_ids", "structured_outputs", "temperature", "thinking_token_budget", "top_k", "top_p",
    "watermarking",
}  # fmt: skip
"""How the next token is chosen: of one sequence, after its prompt."""
TEXT: Final = {
    "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message",
    "documents", "include_reasoning", "media_io_kwargs", "messages", "mm_processor_kwargs", "parallel_tool_calls",
    "reasoning_effort", "suffix", "tool_choice", "tools", "truncate_prompt_tokens", "truncation_side",
}  # fmt: skip
"""What the prompt's tokens are: both engines are told the same, and compare prompt digests."""
ANSWER: Final = {
    "mm_payload", "return_mm_kwargs", "return_prompt_text", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "routed_experts_prompt_start", "skip_special_tokens", "spaces_between_special_tokens",
    "stream_interval",
}  # fmt: skip
"""How the answer is shown."""
RUN: Final = {"cache_salt", "min_tokens", "model", "priority", "request_id", "session_id", "user"}
"""Who asks for what, and when it runs. ``min_tokens``: prefill's is always ours."""
PLACING: Final = {"messages", "model", "session_id"}
"""Looked at all the same, but only to choose engines: those of the model, and those that know the conversation."""

ODD: Final = ["2.0", '"2"', '"1"', "true", "false", '"true"', '"yes"', '"on"', '"t"', "1e0", "1.0", "0", "1", "-1"]
ODDER: Final = ["null", "2", "20e-1", '"2.0"', "123456789012345678901234567890", "[]", "{}", '""', "[2]", "1.5"]
PROMPTS: Final = ['"a"', '["a"]', '["a","b"]', "[1,2]", "[[1,2]]", "[[1],[2]]", '[1,"2"]', '["1","2"]', "[true,false]"]
ODD_PROMPTS: Final = ["[1.0,2]", "[\n1\t,2]", "[]", "null", '""', "7", "{}", "[null]", '["a",1]', "[[],[]]"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "value", [*(one for one in ODD + ODDER if one != "1e0"), '"True"', '"YES"', '"Y"', '"off"', '"n"']
)
def test_a_stream_is_what_vllm_takes_for_one(model: Model, value: str) -> None:
    asked = '"prompt":"a"' if model is CompletionRequest else '"messages":[{"role":"user","content":"a"}]'
    body = f'{{"model":"m",{asked},"stream":{value}}}'
    try:
        streams = bool(model.model_validate_json(body).stream)
    except ValidationError:
        return  # Decode refuses it.
    assert parse_body(body.encode()).is_stream is streams


@pytest.mark.parametrize("model", MODELS)
def test_each_key_of_vllms_requests_is_known_to_be_harmless_or_looked_at(model: Model) -> None:
    known = {*Said.__struct_fields__, *SAMPLING, *TEXT, *ANSWER, *RUN}
    assert set(model.model_fields) - known == set(), "decide what a request with it needs: core/apis/rewrite.py"


def test_no_key_is_called_harmless_that_is_looked_at_or_gone() -> None:
    harmless = SAMPLING | TEXT | ANSWER | RUN
    assert harmless & set(Said.__struct_fields__) == PLACING
    assert harmless <= {name for model in MODELS for name in model.model_fields}


def parsed(model: Model, raw: bytes) -> CompletionRequest | ChatCompletionRequest | None:
    """As vLLM's server reads a body; None: it answers 400."""
    try:
        request = model.model_validate(json.loads(raw))
        request.to_sampling_params(5, {})
    except (ValueError, VLLMValidationError):
        return None
    return request


def num_sequences(request: CompletionRequest | ChatCompletionRequest) -> int:
    prompt = request.prompt if isinstance(request, CompletionRequest) else None
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    num_prompts = len(prompt) if is_list and prompt is not None else 1
    return num_prompts * (1 if request.n is None else request.n)


def plain(model: Model) -> str:
    return '"prompt": "a"' if model is CompletionRequest else '"messages": [{"role": "user", "content": "a"}]'


def assert_is_one_plain_sequence(request: CompletionRequest | ChatCompletionRequest, raw: str) -> None:
    sampling: Any = request.to_sampling_params(5, {})
    assert isinstance(sampling, SamplingParams)
    assert not request.use_beam_search, raw
    assert (num_sequences(request), sampling.n, sampling.prompt_logprobs) == (1, 1, None), raw


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("key", [*PREFILLED_APART, "logprobs", "top_logprobs", "stream", "max_tokens", "min_tokens"])
def test_what_is_prefilled_apart_is_one_sequence_to_vllm_however_it_is_spelled(model: Model, key: str) -> None:
    for value in ODD + ODDER:
        raw = f'{{{plain(model)}, "{key}": {value}}}'
        request = parsed(model, raw.encode())
        body = parse_body(raw.encode())
        if request is not None and not body.needs_local_prefill:
            assert_is_one_plain_sequence(request, raw)
            ordered = parsed(model, b"".join(body.for_prefill(RESERVATION)))
            assert ordered is not None, raw
            assert_is_one_plain_sequence(ordered, raw)


@pytest.mark.parametrize("prompt", PROMPTS + ODD_PROMPTS)
def test_what_is_prefilled_apart_is_one_prompt_to_vllm_however_it_is_spelled(prompt: str) -> None:
    raw = f'{{"prompt": {prompt}}}'
    request = parsed(CompletionRequest, raw.encode())
    if request is not None and not parse_body(raw.encode()).needs_local_prefill:
        assert num_sequences(request) == 1


@pytest.mark.parametrize("model", MODELS)
def test_prefills_body_is_one_token_without_extras_to_vllm_whatever_decode_was_asked_for(model: Model) -> None:
    logprobs = '"logprobs": 3' if model is CompletionRequest else '"logprobs": true, "top_logprobs": 3'
    raw = (
        f'{{{plain(model)}, {logprobs}, "logprob_token_ids": [1], "stream": true, "min_tokens": 3, '
        '"stream_options": {"include_usage": true}, "max_tokens": 9, "max_completion_tokens": 9}'
    ).encode()
    assert parsed(model, raw) is not None
    ordered = parsed(model, b"".join(parse_body(raw).for_prefill(RESERVATION)))
    assert ordered is not None
    limits = ordered.max_tokens, ordered.min_tokens, ordered.stream, ordered.stream_options
    assert limits == (1, 1, False, None)
    sampling: Any = ordered.to_sampling_params(1, {})
    assert (sampling.logprobs, sampling.logprob_token_ids) == (None, None)
    assert parse_reservation(ordered.kv_transfer_params) == RESERVATION
    assert parse_reservation(sampling.extra_args["kv_transfer_params"]) == RESERVATION


@pytest.mark.parametrize(
    "spelling", ["kv_transfer_params", "\\u006bv_transfer_params", "kv\\u005ftransfer\\u005Fparams"]
)
@pytest.mark.parametrize("model", MODELS)
def test_vllm_sees_our_parameters_wherever_the_client_writes_its_own(model: Model, spelling: str) -> None:
    theirs = f'"{spelling}": {{"do_remote_prefill": true, "remote_host": "evil"}}'
    for raw in (f"{{{theirs}, {plain(model)}}}", f"{{{plain(model)}, {theirs}, {theirs} \n}}  "):
        body = parse_body(raw.encode())
        to_decode, to_prefill, alone = (
            parsed(model, b"".join(parts))
            for parts in (body.for_decode(PARAMS), body.for_prefill(RESERVATION), body.for_decode(None))
        )
        assert to_decode is not None
        assert to_prefill is not None
        assert alone is not None
        assert to_decode.kv_transfer_params == to_wire(PARAMS)
        assert parse_reservation(to_prefill.kv_transfer_params) == RESERVATION
        assert alone.kv_transfer_params is None


@pytest.mark.parametrize(
    "served",
    [
        "llama",
        "org/llama-3.1-8b",
        "/models/llama",
        "/models/llama-3.1-8b",
        "/opt/models/a.b, /data/x/y.gguf",
        "/a/b.c/d",
    ],
)
@pytest.mark.parametrize("name", ["none", "/srv/none", "/none", "a/b/c.d"])
def test_an_unknown_models_error_hides_paths_as_vllm_does(name: str, served: str) -> None:
    said = f"The model `{name}` does not exist. Valid aliases: {served}."
    assert model_not_found(name, served).message == sanitize_message(said)
