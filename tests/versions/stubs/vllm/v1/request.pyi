from collections.abc import Mapping
from enum import IntEnum

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec

from pdcluster_protocol.ids import RequestId

class Request:
    _all_token_ids: list[int]
    kv_transfer_params: object
    lora_request: LoRARequest | None
    mm_features: list[MultiModalFeatureSpec]
    num_preemptions: int
    num_prompt_tokens: int
    prompt_token_ids: list[int] | None
    request_id: RequestId
    status: IntEnum
    trace_headers: Mapping[str, str] | None
