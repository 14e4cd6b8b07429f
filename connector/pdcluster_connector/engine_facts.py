"""One engine as its connector sees it: plain values, read from vLLM by ``vllm_facts.py``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdcluster_connector.settings import Settings
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import EngineId
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.side_channel import RegionLayout


class EngineRole(Enum):
    """What an engine does in a hand-over; vLLM's name is ``kv_role``."""

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine as its connector sees it. ``kv_heads`` of the whole model; ``block_size`` in tokens."""

    engine_id: EngineId
    instance_id: str
    """One life of the engine, the same in all of its workers (vLLM's ``instance_id``)."""
    role: EngineRole
    host: str
    block_size: int
    tp_size: int
    kv_heads: int
    device_type: str
    settings: Settings
    secret: Secret


@dataclass(frozen=True, slots=True)
class Memory:
    """A rank's KV memory: ``regions`` address it, ``spans`` (address, bytes) are what a transport registers."""

    regions: tuple[RegionLayout, ...]
    spans: tuple[tuple[int, int], ...]
    fingerprint: KvFingerprint
