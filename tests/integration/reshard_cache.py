"""The token-major KV of a prefill rank, and the whole model's, which the test knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from integration.ranks import Shape as RankShape
from integration.ranks import engine_facts, fingerprint_of
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.engine_facts import EngineFacts, Memory
from pdcluster_connector.settings import Settings
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import EngineId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
KV_HEADS: Final = 8
NUM_LAYERS: Final = 3
CELL_BYTES: Final = (16, 8)
"""Of K and of V: two regions a layer."""
NUM_BLOCKS: Final = 160
BLOCK: Final = 32
REGIONS: Final = range(2 * NUM_LAYERS)


def layer_of(region: int) -> str:
    return f"layers.{region // 2}"


def model_kv(region: int) -> Bytes:
    """[block, token, head, byte] of prefill's blocks, for the whole model; no byte is 0."""
    shape = (NUM_BLOCKS, BLOCK, KV_HEADS, CELL_BYTES[region % 2])
    return np.random.default_rng(region).integers(1, 256, shape, np.uint8)


@dataclass(frozen=True)
class RankCache:
    """The token-major KV of one rank: ``regions[i]`` is [block, token, head of the rank, byte]."""

    tp_rank: int
    tp_size: int
    page_tokens: int
    pages_per_block: int
    regions: list[Bytes]
    stage: int = 0
    num_stages: int = 1

    def holds(self, region: int) -> bool:
        """Whether the region's layer is in the rank's stage."""
        return region // 2 * self.num_stages // NUM_LAYERS == self.stage

    @property
    def heads(self) -> slice:
        heads = Sharding(self.tp_size, KV_HEADS).heads_of(self.tp_rank)
        return slice(heads.start, heads.stop)

    def memory(self) -> Memory:
        """As ``register_kv_caches`` would see it."""
        regions = tuple(
            RegionLayout(
                layer_of(index), 0, data.ctypes.data, NUM_BLOCKS, data[0].nbytes // self.pages_per_block,
                data[0].nbytes // self.pages_per_block, RegionKind.TOKENS, KV_HEADS, self.page_tokens,
                self.pages_per_block,
            )
            for index, data in enumerate(self.regions)
            if self.holds(index)
        )  # fmt: skip
        spans = tuple((data.ctypes.data, data.nbytes) for data in self.regions)
        layout = RankLayout(self.tp_rank, self.tp_size, regions, self.stage, self.num_stages)
        return Memory(layout, spans, fingerprint())

    def views(self) -> tuple[torch.Tensor, ...]:
        """Of each region that it holds ``[pages, heads, tokens, bytes]``: its content can be compared by these."""
        import torch

        held = [data for index, data in enumerate(self.regions) if self.holds(index)]
        pages = [data.reshape(-1, self.page_tokens, *data.shape[2:]) for data in held]
        return tuple(torch.from_numpy(of_region).transpose(1, 2) for of_region in pages)


def fingerprint() -> KvFingerprint:
    return fingerprint_of(RankShape(kv_heads=KV_HEADS), layout="LBNHC")


def prefill_cache(tp_rank: int, tp_size: int) -> RankCache:
    empty = RankCache(tp_rank, tp_size, BLOCK, 1, [])
    regions = [np.ascontiguousarray(model_kv(region)[:, :, empty.heads]) for region in REGIONS]
    return replace(empty, regions=regions)


def facts_of(role: Role, name: str, tp_size: int, block_tokens: int, settings: Settings) -> EngineFacts:
    facts = engine_facts(role, RankShape(kv_heads=KV_HEADS), settings)
    return replace(facts, engine_id=EngineId(name), tp_size=tp_size, groups=(KvGroup(block_tokens),))
