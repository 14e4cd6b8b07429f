"""What the facade does to vLLM's own objects."""

from __future__ import annotations

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from pdcluster_connector.connector import PDClusterConnector, leave_out_last_token


def request_of(tokens: list[int]) -> Request:
    """As vLLM's scheduler adds it."""
    return Request("r", tokens, SamplingParams(max_tokens=1), None)


def test_prefill_of_a_stateful_model_leaves_the_last_token_to_decode() -> None:
    request = request_of([5, 6, 7])
    leave_out_last_token(request)
    assert request.prompt_token_ids == [5, 6]
    assert list(request.all_token_ids) == [5, 6]
    assert request.num_prompt_tokens == request.num_tokens == 2


def test_a_prompt_of_one_token_stays_as_it_is() -> None:
    request = request_of([5])
    leave_out_last_token(request)
    assert request.prompt_token_ids == list(request.all_token_ids) == [5]
    assert request.num_prompt_tokens == 1


def test_a_prompt_of_embeddings_stays_as_it_is() -> None:
    request = Request("r", None, SamplingParams(max_tokens=1), None, prompt_embeds=torch.zeros(3, 8))
    leave_out_last_token(request)
    assert request.prompt_token_ids is None
    assert request.num_prompt_tokens == request.num_tokens == 3


def test_decode_keeps_its_whole_graphs() -> None:
    """vLLM would otherwise take them from every engine that has the connector."""
    assert not PDClusterConnector.requires_piecewise_for_cudagraph({})
