from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from pdcluster_protocol.ids import RequestId

class KVConnectorOutput:
    failed_recving: set[RequestId]
    finished_recving: set[RequestId] | None
    finished_sending: set[RequestId] | None
    invalid_block_ids: set[int]
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None
