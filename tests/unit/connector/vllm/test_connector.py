"""What the facade does to vLLM's own objects."""

from __future__ import annotations

from importlib import import_module

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from integration.ranks import SECRET
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler
from pdcluster_connector.settings import PushTiming
from pdcluster_connector.vllm.connector import PDClusterConnector, leave_out_last_token
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.launch import CONNECTOR, CONNECTOR_MODULE


def request_of(tokens: list[int]) -> Request:
    """As vLLM's scheduler adds it."""
    return Request("r", tokens, SamplingParams(max_tokens=1), None)


def prefill_connector() -> PDClusterConnector:
    """The scheduler half of a prefill engine, without the vLLM configuration that it is read from."""
    made = PDClusterConnector.__new__(PDClusterConnector)
    engine = PrefillEngine(1, (2,), (KvGroup(16),))
    made._prefill_scheduler = PrefillScheduler(engine, PushTiming.LAYERWISE, SECRET, BootId("life"))
    made._decode_scheduler = None
    return made


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


def test_transfer_parameters_that_are_no_object_end_their_request_and_not_the_engine() -> None:
    """vLLM takes them through vllm_xargs, and looks keys up in them after us."""
    connector, request = prefill_connector(), request_of([5, 6, 7])
    request.kv_transfer_params = "text"
    connector.on_new_request(request)
    assert request.kv_transfer_params.get("do_remote_prefill") is None
    _, answer = connector.request_finished(request, [])
    assert answer is not None
    assert "kv_transfer_params have version None" in answer["pdcluster_reason"]


def test_decode_keeps_its_whole_graphs() -> None:
    """vLLM would otherwise take them from every engine that has the connector."""
    assert not PDClusterConnector.requires_piecewise_for_cudagraph({})


def test_the_plugin_names_this_very_class() -> None:
    assert getattr(import_module(CONNECTOR_MODULE), CONNECTOR) is PDClusterConnector
