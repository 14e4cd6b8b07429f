from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

class MultiKVConnectorMetadata:
    metadata: tuple[KVConnectorMetadata, ...]
