"""vLLM's own request models and parallel sampling against ``core/apis/parts.py``: what is taken apart, and as what."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

from pdcluster_router.core.apis.parts import CHAT_KEYS, COMPLETION_KEYS, taken_apart
from pdcluster_router.core.apis.rewrite import PREFILLED_APART, parse_body

LEFT_WHOLE: Final = {"kv_transfer_params", "ec_transfer_params", "watermarking"}
"""Keys of vLLM that no request in parts may have. What a watermark does to several sequences was not looked at."""
OLDER: Final = {"best_of", "prompt_cache_key", "prompt_embeds"}
"""Keys that vLLM 0.32 has no more, in one of the two models or in both, or that only OpenAI has."""
HELLO: Final = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("model", "keys"), [(CompletionRequest, COMPLETION_KEYS), (ChatCompletionRequest, CHAT_KEYS)])
def test_each_key_of_vllms_requests_is_allowed_in_parts_or_known_to_be_not(model: Any, keys: frozenset[str]) -> None:
    assert set(model.model_fields) - keys == LEFT_WHOLE, "decide what it means for each sequence: core/apis/parts.py"
    assert keys - set(model.model_fields) <= OLDER
    assert set(PREFILLED_APART) <= keys


def sampled(model: Any, raw: bytes) -> SamplingParams:
    return cast("SamplingParams", model.model_validate(json.loads(raw)).to_sampling_params(5, {}))


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, {"prompt": "a", "n": 3, "seed": 7, "logprobs": 2, "stop": ["x"], "stream": True}),
        (CompletionRequest, {"prompt": [1, 2], "n": 2, "temperature": 0.5, "min_tokens": 2}),
        (ChatCompletionRequest, {"messages": HELLO, "n": 3, "seed": 0, "logprobs": True, "top_logprobs": 2}),
        (ChatCompletionRequest, {"messages": HELLO, "n": 2, "top_p": 0.5}),
    ],
)
def test_a_part_samples_as_vllms_own_child_of_the_whole(model: Any, fields: dict[str, Any]) -> None:
    raw = json.dumps(fields).encode()
    parts = taken_apart(parse_body(raw), is_chat="messages" in fields, num_header_bytes=0)
    assert parts is not None
    whole = SimpleNamespace(request_id="R", external_req_id="R", params=sampled(model, raw))
    parent = ParentRequest(cast("EngineCoreRequest", whole))
    for number, body in enumerate(parts.bodies):
        _, child = parent.get_child_info(number)
        assert sampled(model, b"".join(body.for_decode(None))) == child


@pytest.mark.parametrize("prompt", [["a", ""], ["é", "b", "c"], [[1, 2], [3]]])
def test_the_prompts_of_parts_are_those_of_the_whole(prompt: list[Any]) -> None:
    raw = json.dumps({"prompt": prompt, "max_tokens": 3}).encode()
    parts = taken_apart(parse_body(raw), is_chat=False, num_header_bytes=0)
    assert parts is not None
    found = [CompletionRequest.model_validate(json.loads(b"".join(body.for_decode(None)))) for body in parts.bodies]
    whole = CompletionRequest.model_validate(json.loads(raw))
    assert [one.prompt for one in found] == [[one] for one in cast("list[Any]", whole.prompt)]
    assert {one.max_tokens for one in found} == {3}


@pytest.mark.parametrize("temperature", [0, 1e-6, 0.01, 1])
def test_choices_that_vllm_refuses_are_left_to_it(temperature: float) -> None:
    raw = json.dumps({"prompt": "a", "n": 2, "temperature": temperature}).encode()
    parts = taken_apart(parse_body(raw), is_chat=False, num_header_bytes=0)
    try:
        sampled(CompletionRequest, raw)
    except (ValueError, VLLMValidationError):
        assert parts is None
    else:
        assert parts is not None
