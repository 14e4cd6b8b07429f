"""Collects facts of vLLM's configuration and memory, once, as plain values.

Source of truth: vLLM 0.32 ``config/``, ``v1/kv_cache_interface.py``, ``v1/attention/backends``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.engine_facts import EngineFacts, Memory
from pdcluster_connector.reshard import open_reshard_group, region_bytes
from pdcluster_connector.settings import parse_settings, require_ipv4
from pdcluster_connector.vllm.cells import LayerKv
from pdcluster_connector.vllm.drafts import draft_of, is_draft_layer, models_of
from pdcluster_connector.vllm.fingerprint import head_major, kv_heads_of, read_fingerprint
from pdcluster_connector.vllm.load_errors import can_fail_running, require_one_group
from pdcluster_connector.vllm.options import require_startable
from pdcluster_connector.vllm.specs import TOKEN_MAJOR, meaning_of, require_axes
from pdcluster_connector.vllm.state import runs_of
from pdcluster_connector.vllm.versions import RELEASE
from pdcluster_connector.worker.resharding import TokenMemory
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import EngineId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import KV_ROLES
from pdcluster_protocol.secret import load_secret
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

_WINDOWED: Final = frozenset({ChunkedLocalAttentionSpec, SlidingWindowMLASpec, SlidingWindowSpec})
"""Kinds of KV of which vLLM takes blocks back while a request runs."""


def register_connector(name: str, module: str) -> None:
    """vLLM can make the connector ``name``. Does nothing the second time."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def read_engine_facts(config: VllmConfig, cache: KVCacheConfig) -> EngineFacts:
    """The facts of this engine.

    Raises:
        ConfigError: The engine cannot take part in a hand-over. The message names the setting, its value and the cure.
    """
    transfer = config.kv_transfer_config
    parallel = config.parallel_config
    settings = parse_settings(transfer.kv_connector_extra_config)
    role = _role(transfer.kv_role)
    groups = tuple(_group(group) for group in cache.kv_cache_groups)
    require_startable(config, role, settings, groups, RELEASE)
    host = settings.host or get_ip()
    require_ipv4(host)
    recomputes = transfer.kv_load_failure_policy == "recompute"
    if not RELEASE.fails_by_request:
        require_one_group(RELEASE.version, groups, recomputes=recomputes)
    return EngineFacts(
        EngineId(transfer.engine_id),
        role,
        host,
        parallel.tensor_parallel_size,
        kv_heads_of(*models_of(config)),
        config.device_config.device_type,
        settings,
        load_secret(os.environ, host=host),
        groups,
        parallel.pipeline_parallel_size,
        parallel.data_parallel_index,
        can_fail_running=can_fail_running(groups, recomputes=recomputes),
    )


def read_memory(facts: EngineFacts, config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, LayerKv]) -> Memory:
    """The tensors of ``register_kv_caches``, as addresses and views of bytes. Worker processes only.

    ``tensors``: per layer ``[pages, KV heads, tokens, content]``, in memory with heads or with tokens first, or the
    tensors of its state ``[blocks, ...]``; on the engine's device, borrowed for the engine's life. A block may span
    several pages, which then lie side by side.

    Raises:
        ConfigError: A layer keeps its KV in a way that cannot be pushed.
    """
    specs = _group_specs(cache)
    regions = tuple(
        region
        for name, held in tensors.items()
        for region in read_regions(name, *specs[name], held, cache, facts, config)
    )
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _flat(tensors.values())}
    stage = get_pp_group().rank_in_group
    kept = (spec for group in cache.kv_cache_groups for spec in _specs_of(group))
    fingerprint = read_fingerprint(config, _layout_of(cache), kept, tensors)
    layout = RankLayout(get_tp_group().rank_in_group, facts.tp_size, regions, stage, facts.num_stages)
    return Memory(layout, tuple(storages.items()), fingerprint, tuple(map(_view_of, _flat(tensors.values()))))


def _view_of(tensor: torch.Tensor) -> torch.Tensor:
    """A region's bytes as ``[pages, KV heads, tokens, bytes]``; of state ``[blocks, 1, 1, bytes]``.

    ``require_axes`` has checked that the tensor has the axes of its spec.
    """
    return (tensor if tensor.dim() == 4 else tensor.flatten(1)[:, None, None]).view(torch.uint8)


def read_token_memory(
    facts: EngineFacts, memory: Memory, cache: KVCacheConfig, tensors: Mapping[str, LayerKv]
) -> TokenMemory | None:
    """The facts for resharding token-major KV on a prefill rank; None: this rank has no such KV.

    Every worker of the engine calls it at engine start, after ``read_memory``. It waits for the other workers.
    """
    regions = memory.layout.regions
    mine = {
        index: region_bytes(tensor, region.base, region.span_bytes)
        for index, (region, tensor) in enumerate(zip(regions, _flat(tensors.values()), strict=True))
        if region.kind is RegionKind.TOKENS
    }
    # The layout's name decides, where there is one: a stage without attention must take part too, or others would wait.
    if not (mine if (layout := _layout_of(cache)) is None else layout in TOKEN_MAJOR):
        return None
    group = _open_tp_group(facts.tp_size, facts.settings.reshard_timeout_s)
    return TokenMemory(group, mine) if mine else None


def _open_tp_group(tp_size: int, timeout_s: float) -> dist.ProcessGroup | None:
    """A process group like this rank's TP group; None for TP 1. TP groups are runs of ranks (vLLM 0.32
    ``parallel_state.py``)."""
    if tp_size == 1:
        return None
    firsts = range(0, dist.get_world_size(), tp_size)
    groups = [open_reshard_group(range(first, first + tp_size), timeout_s) for first in firsts]
    return groups[dist.get_rank() // tp_size]


def _role(kv_role: str) -> Role:
    for role, name in KV_ROLES.items():
        if name == kv_role:
            return role
    raise ConfigError(
        f"kv_role is {kv_role!r}: start a prefill engine with kv_producer and a decode engine with kv_consumer"
    )


def _group(group: KVCacheGroupSpec) -> KvGroup:
    specs = _specs_of(group)
    kinds = {meaning_of(spec) for spec in specs}
    if kinds != {MambaSpec}:
        return KvGroup(group.kv_cache_spec.block_size, is_windowed=not kinds.isdisjoint(_WINDOWED))
    (mode,) = {spec.mamba_cache_mode for spec in specs if isinstance(spec, MambaSpec)}
    if mode not in ("none", "align"):
        raise ConfigError(
            f"--mamba-cache-mode is {mode}: PDClusterConnector 0.1 pushes one state for a request; choose none or align"
        )
    return KvGroup(1, is_state=True, state_every=group.kv_cache_spec.block_size if mode == "align" else 0)


def own_layers(cache: KVCacheConfig, tensors: Mapping[str, LayerKv]) -> dict[str, LayerKv]:
    """The layers that keep KV of their own.

    Any other layer shares the KV of one of these, its target, and has the target's tensor (vLLM 0.32
    ``shared_kv_cache_layers``). It is in no KV group, or in the target's group after the target.
    """
    group_of = {name: index for index, group in enumerate(cache.kv_cache_groups) for name in group.layer_names}
    own: dict[tuple[int, ...], str] = {}
    for name in (name for name in tensors if name in group_of):
        own.setdefault((group_of[name], *(tensor.data_ptr() for tensor in _flat([tensors[name]]))), name)
    return {name: tensors[name] for name in own.values()}


def _group_specs(cache: KVCacheConfig) -> dict[str, tuple[int, KVCacheSpec]]:
    """By layer name: the number of the layer's KV group, and the layer's spec."""
    groups = enumerate(cache.kv_cache_groups)
    return {name: (index, spec) for index, group in groups for name, spec in _layer_specs(group)}


def _specs_of(group: KVCacheGroupSpec) -> tuple[KVCacheSpec, ...]:
    """The kinds of KV in the group, also on a pipeline stage without layers of the group: vLLM 0.32's
    ``_project_kv_cache_groups_to_worker`` then takes the names away and leaves the spec."""
    spec = group.kv_cache_spec
    return tuple(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def _layer_specs(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.items()
    else:
        yield from ((name, spec) for name in group.layer_names)


def read_regions(
    name: str,
    group: int,
    spec: KVCacheSpec,
    held: LayerKv,
    cache: KVCacheConfig,
    facts: EngineFacts,
    config: VllmConfig,
) -> Iterator[RegionLayout]:
    """The regions of one layer.

    Raises:
        ConfigError: Its tensors do not have the axes of its spec, a block of it is not one run of bytes, or its heads
            are not known.
    """
    tensors, num_blocks, is_draft = list(_flat([held])), cache.num_blocks, is_draft_layer(config, name)
    require_axes(name, spec, tensors, num_blocks, _layout_of(cache))
    layer = config.compilation_config.static_forward_context.get(name)
    runs = runs_of(spec, len(tensors), facts.tp_size, layer) if isinstance(spec, MambaSpec) else ()
    for number, tensor in enumerate(tensors):
        is_token_major = is_by_token(tensor) and not isinstance(spec, MambaSpec)
        _require_whole_blocks(name, tensor, num_blocks, is_token_major=is_token_major)
        size = tensor.element_size()
        place = (name, group, tensor.data_ptr(), num_blocks, tensor.stride(0) * size, tensor[0].numel() * size)
        if isinstance(spec, MambaSpec):
            yield RegionLayout(*place, RegionKind.STATE, 1, 1, is_draft=is_draft, runs=runs[number])
            continue
        assert isinstance(spec, AttentionSpec), "meaning_of has refused any other"
        is_latent = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
        per_head = RegionKind.TOKENS if is_token_major else RegionKind.HEADS
        kind = RegionKind.LATENT if is_latent else per_head
        heads = 1 if is_latent else _total_heads(name, spec.num_kv_heads, facts, config)
        is_linear = is_latent or _is_linear(config, name)
        pages, step = tensor.shape[0] // num_blocks, _window_step(spec)
        yield RegionLayout(*place, kind, heads, spec.block_size // pages, pages, is_linear, step, is_draft)


def _require_whole_blocks(name: str, tensor: torch.Tensor, num_blocks: int, *, is_token_major: bool) -> None:
    """The tensor is made of whole blocks, and each of its pages is one run of bytes.

    Raises:
        ConfigError: It is not.
    """
    page = tensor[0].transpose(0, 1) if is_token_major else tensor[0]
    if tensor.shape[0] % num_blocks or not page.is_contiguous():
        raise ConfigError(
            f"layer {name} has KV of shape {tuple(tensor.shape)} and strides {tensor.stride()} for {num_blocks} "
            f"blocks: start vLLM with VLLM_KV_CACHE_LAYOUT={head_major(RELEASE.names_layouts)}"
        )


def _layout_of(cache: KVCacheConfig) -> str | None:
    """The layout that vLLM declares, by name; None where it declares none."""
    return cache.kv_cache_layout if RELEASE.names_layouts else None


def _window_step(spec: KVCacheSpec) -> int:
    """The ``RegionLayout.window_step`` of ``spec``. Where windows begin: vLLM 0.32 ``single_type_kv_cache_manager.py``.

    A push of each token at its own step would not do: the next step gives blocks before the window to other requests,
    while a lane may still read them.
    """
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return int(isinstance(spec, SlidingWindowSpec))


def is_by_token(tensor: torch.Tensor) -> bool:
    """Whether the tensor ``[pages, KV heads, tokens, content]`` keeps all heads of a token side by side.

    With one head the strides still tell: vLLM permutes the axes of memory that it allocates as [tokens][heads].
    """
    return tensor.dim() == 4 and tensor.shape[2] > 1 and tensor.stride(2) >= tensor.stride(1)


def page_tokens_of(layout: RankLayout, groups: Sequence[KvGroup]) -> tuple[int, ...]:
    """Tokens in a page of each KV group, as this rank has it; 1 where it has no layer of the group, or state."""
    tokens = [1] * len(groups)
    for region in layout.regions:
        if region.has_tokens:
            tokens[region.group] = region.page_tokens
    return tuple(tokens)


def _total_heads(name: str, local: int, facts: EngineFacts, config: VllmConfig) -> int:
    """KV heads of a layer in the whole model, of which this rank holds ``local``."""
    draft = draft_of(config) if is_draft_layer(config, name) else None
    (heads,) = kv_heads_of(draft or config.model_config)
    if max(1, heads // facts.tp_size) != local:
        raise ConfigError(
            f"layer {name} has {local} KV heads on this rank of TP {facts.tp_size}, and its model has {heads} of them: "
            "how its heads are spread is not known, so report this model"
        )
    return heads


def _is_linear(config: VllmConfig, name: str) -> bool:
    """Whether token t of a head is the t-th cell of its page (not so with vLLM 0.32's CPU kernels)."""
    layer = config.compilation_config.static_forward_context.get(name)
    return layer is None or not hasattr(layer, "get_attn_backend") or layer.get_attn_backend().get_name() != "CPU_ATTN"


def _flat(held: Iterable[LayerKv]) -> Iterator[torch.Tensor]:
    for tensors in held:
        yield from [tensors] if isinstance(tensors, torch.Tensor) else tensors
