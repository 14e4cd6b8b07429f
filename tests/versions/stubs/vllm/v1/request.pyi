from vllm.lora.request import LoRARequest

from pdcluster_protocol.ids import RequestId

class Request:
    _all_token_ids: list[int]
    kv_transfer_params: object
    lora_request: LoRARequest | None
    num_preemptions: int
    num_prompt_tokens: int
    prompt_token_ids: list[int] | None
    request_id: RequestId
