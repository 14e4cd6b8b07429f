"""One engine as its connector sees it: plain values, read from vLLM by ``vllm/facts.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdcluster_connector.core.watermark import KvGroup, num_kept_back
from pdcluster_connector.settings import Settings
from pdcluster_connector.worker.content_sums import KvReader
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import EngineId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.side_channel import RankLayout


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine as its connector sees it. ``kv_heads``: distinct numbers of KV heads of the whole model's layers."""

    engine_id: EngineId
    """The engine's name in messages of this process. vllm-ascend gives each process of an engine another id."""
    role: Role
    host: str
    tp_size: int
    kv_heads: tuple[int, ...]
    device_type: str
    settings: Settings
    secret: Secret
    groups: tuple[KvGroup, ...]
    """KV groups of the whole engine, in the order of its block tables."""
    num_stages: int = 1
    dp_rank: int = 0
    can_fail_running: bool = False
    """Whether vLLM fails a request that runs if one of its blocks is named to it, and drops the token of the step:
    ``vllm/load_errors.py``."""

    @property
    def keeps_last_token(self) -> bool:
        """Whether prefill stops one token early."""
        return num_kept_back(self.groups) > 0


@dataclass(frozen=True, slots=True)
class Memory:
    """A rank's KV memory: ``layout`` addresses it, ``spans`` (address, bytes) are what a transport registers."""

    layout: RankLayout
    spans: tuple[tuple[int, int], ...]
    fingerprint: KvFingerprint
    views: tuple[torch.Tensor, ...] = ()
    """For each region ``[pages, KV heads, tokens, bytes]``: uint8, on the engine's device, borrowed while it runs."""

    @property
    def reader(self) -> KvReader | None:
        """A reader of the KV by layer, head and token; None: there are no views."""
        return KvReader(self.layout, self.views) if self.views else None

    def aligned_spans(self, alignment_bytes: int) -> tuple[tuple[int, int], ...]:
        """The spans, cut to begin on a multiple of ``alignment_bytes``, as a transport may need them for registration.

        vLLM-Ascend allocates more memory than it needs, and keeps KV from the first aligned address on.

        Raises:
            ConfigError: KV lies outside of the cut spans.
        """
        begins = [-(-address // alignment_bytes) * alignment_bytes for address, _ in self.spans]
        ends = [address + num_bytes for address, num_bytes in self.spans]
        spans = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
        for region in self.layout.regions:
            if not any(begin <= region.base and region.base + region.span_bytes <= end for begin, end in spans):
                raise ConfigError(
                    f"KV of layer {region.layer_name} at {region.base:#x} lies outside of memory that begins on a "
                    f"multiple of {alignment_bytes} bytes, as this device's transport needs it: allocate the KV cache "
                    "with that alignment"
                )
        return tuple((begin, end - begin) for begin, end in spans)
