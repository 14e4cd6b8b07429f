"""One engine as its connector sees it: plain values, read from vLLM by ``vllm_facts.py``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.settings import Settings
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import EngineId
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.side_channel import RankLayout


class EngineRole(Enum):
    """What an engine does in a hand-over; vLLM's name is ``kv_role``."""

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine as its connector sees it. ``kv_heads``: distinct numbers of KV heads of the whole model's layers."""

    engine_id: EngineId
    instance_id: str
    """One life of the engine, the same in all of its workers (vLLM's ``instance_id``)."""
    role: EngineRole
    host: str
    tp_size: int
    kv_heads: tuple[int, ...]
    device_type: str
    settings: Settings
    secret: Secret
    groups: tuple[KvGroup, ...]
    """Of the whole engine, in the order of its block tables."""
    num_stages: int = 1
    dp_rank: int = 0

    @property
    def is_stateful(self) -> bool:
        """Whether a request has recurrent state: prefill stops one token early."""
        return any(group.is_state for group in self.groups)


@dataclass(frozen=True, slots=True)
class Memory:
    """A rank's KV memory: ``layout`` addresses it, ``spans`` (address, bytes) are what a transport registers."""

    layout: RankLayout
    spans: tuple[tuple[int, int], ...]
    fingerprint: KvFingerprint
