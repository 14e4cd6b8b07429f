from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from vllm.config import VllmConfig

@dataclass
class KVConnectorStats:
    data: dict[str, int] = ...
    def aggregate(self, other: Self) -> Self: ...
    def is_empty(self) -> bool: ...
    def reduce(self) -> dict[str, int | float]: ...
    def reset(self) -> None: ...

class KVConnectorPromMetrics:
    per_engine_labelvalues: dict[int, list[object]]
    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None: ...
    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = ...) -> None: ...
