from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from pdcluster_protocol.ids import RequestId

class NewRequestData:
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    req_id: str

class CachedRequestData:
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    req_ids: list[RequestId]
    resumed_req_ids: set[str]

class KVConnectorBlockState:
    resolve_block_ids: Callable[[RequestId], tuple[list[int], ...]]

class SchedulerOutput:
    finished_req_ids: set[RequestId]
    # None on its way to a worker; the connector's scheduler half reads it before.
    kv_connector_block_state: KVConnectorBlockState
    kv_connector_metadata: KVConnectorMetadata | None
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[RequestId] | None
    scheduled_cached_reqs: CachedRequestData
    scheduled_new_reqs: list[NewRequestData]
