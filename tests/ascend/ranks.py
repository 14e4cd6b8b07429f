"""Ranks whose KV is what vllm-ascend makes, read by our connector as ``register_kv_caches`` would."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend.recorded import Case, Layer, case_of
from integration.ranks import Shape, engine_facts, fingerprint_of
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.engine_facts import EngineFacts, Memory
from pdcluster_connector.reshard.tensors import region_bytes
from pdcluster_connector.settings import Settings
from pdcluster_connector.vllm.cells import in_new_axes
from pdcluster_connector.vllm.facts import _view_of, read_regions
from pdcluster_connector.worker.resharding import TokenMemory
from pdcluster_protocol.labels import Role
from pdcluster_protocol.side_channel import RankLayout, RegionLayout


def views_of(layer: Layer) -> list[torch.Tensor]:
    return list(in_new_axes({layer.name: layer}, {layer.name: layer.held})[layer.name])


def regions_of(case: Case, layer: Layer, tp_size: int = 1) -> list[RegionLayout]:
    """As a rank reads them. A latent is whole on each of its engine's ranks; others have their heads."""
    local = layer.spec.num_kv_heads
    heads = local if local == 1 else local * tp_size
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_attention_free=False, use_mla=heads == 1, get_total_num_kv_heads=lambda: heads),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={layer.name: layer}),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    cache = SimpleNamespace(num_blocks=case.num_blocks, kv_cache_layout=None)
    facts = replace(engine_facts(Role.PREFILL, Shape(kv_heads=heads), Settings()), tp_size=tp_size)
    return list(read_regions(layer.name, layer.group, layer.spec, tuple(views_of(layer)), cache, facts, config))


def write(layer: Layer, seed: int) -> list[npt.NDArray[np.uint8]]:
    """Random content by what the axes mean; of each tensor ``[pages, heads, tokens, bytes]``."""
    written = []
    for number, tensor in enumerate(layer.held):
        bytes_of = tensor.view(torch.uint8).permute(*map(layer.axes.index, ("pages", "heads", "tokens", "content")))
        content = np.random.default_rng((seed, number)).integers(0, 256, tuple(bytes_of.shape), np.uint8)
        bytes_of.copy_(torch.from_numpy(content))
        written.append(content)
    return written


def rank_of(name: str, tp_rank: int, tp_size: int, content: int | None) -> tuple[RankLayout, Case, list[Any]]:
    """A rank of an engine of its own. ``content``: the seed of what its KV holds; None: nothing yet."""
    case = case_of(name)
    written = [write(layer, content) for layer in case.layers] if content is not None else []
    regions = tuple(region for layer in case.layers for region in regions_of(case, layer, tp_size))
    return RankLayout(tp_rank, tp_size, regions), case, written


def memory_of_rank(layout: RankLayout, case: Case) -> Memory:
    """As ``read_memory`` says it, of a CPU."""
    storages = [tensor.untyped_storage() for layer in case.layers for tensor in layer.held]
    spans = tuple((storage.data_ptr(), storage.nbytes()) for storage in storages)
    views = tuple(_view_of(view) for layer in case.layers for view in views_of(layer))
    return Memory(layout, spans, fingerprint_of(Shape()), views)


def token_memory_of(memory: Memory) -> TokenMemory:
    """Of a prefill engine of TP 1, all of whose KV is token-major."""
    placed = enumerate(zip(memory.layout.regions, memory.views, strict=True))
    return TokenMemory(None, {at: region_bytes(view, region.base, region.span_bytes) for at, (region, view) in placed})


def facts_of(role: Role, case: Case, settings: Settings, tp_size: int = 1) -> EngineFacts:
    heads, groups = case.layers[0].spec.num_kv_heads * tp_size, tuple(map(KvGroup, case.block_tokens))
    return replace(engine_facts(role, Shape(kv_heads=heads), settings), groups=groups, tp_size=tp_size)
