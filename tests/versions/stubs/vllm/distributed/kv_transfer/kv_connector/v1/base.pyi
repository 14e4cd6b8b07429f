from enum import Enum
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdcluster_protocol.ids import RequestId

class KVConnectorRole(Enum):
    SCHEDULER = ...

class KVConnectorHandshakeMetadata: ...
class KVConnectorMetadata: ...
class SupportsHMA: ...

class KVConnectorWorkerMetadata:
    def aggregate(self, other: Self) -> Self: ...

class KVConnectorTransferResults:
    failed_recving: set[RequestId]
    finished_recving: set[RequestId]
    finished_sending: set[RequestId]

class KVConnectorBase_V1:  # noqa: N801  # vLLM's name
    # What of it is overridden and not called: `hooks` of the record.
    _kv_cache_config: KVCacheConfig
    _vllm_config: VllmConfig
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None: ...
    def bind_connector_metadata(self, connector_metadata: Any) -> None: ...  # by our own build_connector_meta
