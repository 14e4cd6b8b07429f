"""Everything the connector knows about vLLM's configuration and memory, read once into plain values.

Source of truth: vLLM 0.32 ``config/``, ``v1/kv_cache_interface.py``, ``v1/attention/backends``. No other
file but the facade imports vllm.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.engine_facts import EngineFacts, EngineRole, Memory
from pdcluster_connector.settings import parse_settings
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import EngineId
from pdcluster_protocol.secret import load_secret
from pdcluster_protocol.side_channel import RegionLayout

CONNECTOR_VERSION: Final = "0.1.0"
_WEIGHT_SUFFIXES: Final = frozenset((".safetensors", ".bin", ".pt", ".gguf"))
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096
"""Per weight file: 256 KiB read at engine start."""

HEAD_MAJOR: Final = "LBHNC"
"""The layout in which a rank's heads are one slice of a block (vLLM 0.32 ``v1/kv_cache_layout.py``)."""


def register_connector(name: str, module: str) -> None:
    """vLLM can make the connector ``name``. Does nothing the second time."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def read_engine_facts(config: VllmConfig) -> EngineFacts:
    """The facts of this engine.

    Raises:
        ConfigError: The engine cannot take part in a hand-over; names the setting, its value and the cure.
    """
    transfer = config.kv_transfer_config
    parallel = config.parallel_config
    settings = parse_settings(transfer.kv_connector_extra_config)
    _require_ones(parallel)
    host = settings.host or get_ip()
    return EngineFacts(
        EngineId(transfer.engine_id),
        config.instance_id,
        _role(transfer.kv_role),
        host,
        config.cache_config.block_size,
        parallel.tensor_parallel_size,
        _kv_heads(config.model_config),
        config.device_config.device_type,
        settings,
        load_secret(os.environ, host=host),
    )


def tp_rank() -> int:
    """This worker's TP rank. Worker processes only."""
    rank: int = get_tp_group().rank_in_group
    return rank


def read_memory(
    facts: EngineFacts, config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, torch.Tensor]
) -> Memory:
    """What ``register_kv_caches`` hands over, as addresses.

    ``tensors``: per layer ``[kernel blocks, KV heads, tokens, K and V]``, on the engine's device, borrowed
    for the engine's life. A manager block may span several kernel blocks, which then lie side by side.

    Raises:
        ConfigError: A layer keeps its KV in a way that cannot be pushed.
    """
    groups = {name: index for index, group in enumerate(cache.kv_cache_groups) for name in group.layer_names}
    regions = tuple(_region(name, groups, tensor, cache.num_blocks) for name, tensor in tensors.items())
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    fingerprint = _fingerprint(facts, config, cache, next(iter(tensors.values())), regions)
    return Memory(regions, tuple(storages.items()), fingerprint)


def require_one_kind_of_cache(cache: KVCacheConfig) -> None:
    """The model keeps plain attention KV in one group.

    Raises:
        ConfigError: It does not: sliding windows, recurrent state or several groups.
    """
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups})
    if kinds not in (["FullAttentionSpec"], ["MLAAttentionSpec"]) or len(cache.kv_cache_groups) != 1:
        raise ConfigError(
            f"the model keeps its KV as {', '.join(kinds)} in {len(cache.kv_cache_groups)} groups; "
            "PDClusterConnector 0.1 pushes models with full attention only: serve it without prefill/decode separation"
        )


def _require_ones(parallel: Any) -> None:
    """One worker holds the whole model. The cores are written for TP; no real engine has proven it yet.

    Raises:
        ConfigError: Something splits the model, and so changes where a token's KV lies or when a layer is final.
    """
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name)) != 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {size}: PDClusterConnector 0.1 needs 1")
    if parallel.use_ubatching:
        raise ConfigError("--enable-dbo or --ubatch-size splits each step: PDClusterConnector 0.1 needs whole steps")


def _role(kv_role: str) -> EngineRole:
    try:
        return EngineRole(kv_role)
    except ValueError:
        raise ConfigError(
            f"kv_role is {kv_role!r}: start a prefill engine with kv_producer and a decode engine with kv_consumer"
        ) from None


def _kv_heads(model_config: Any) -> int:
    heads: int = 1 if model_config.use_mla else model_config.get_total_num_kv_heads()
    return heads


def _region(name: str, groups: Mapping[str, int], tensor: torch.Tensor, num_blocks: int) -> RegionLayout:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"layer {name} keeps {type(tensor).__name__} state: only tensors can be pushed")
    kernel_blocks = tensor.shape[0]
    if kernel_blocks % num_blocks or not tensor[0].is_contiguous():
        raise ConfigError(
            f"layer {name} has KV of shape {tuple(tensor.shape)} and strides {tensor.stride()} for {num_blocks} "
            f"blocks: start vLLM with VLLM_KV_CACHE_LAYOUT={HEAD_MAJOR}"
        )
    block_bytes = tensor.stride(0) * tensor.element_size() * (kernel_blocks // num_blocks)
    return RegionLayout(name, groups[name], tensor.data_ptr(), num_blocks, block_bytes)


def _fingerprint(
    facts: EngineFacts,
    config: VllmConfig,
    cache: KVCacheConfig,
    tensor: torch.Tensor,
    regions: Sequence[RegionLayout],
) -> KvFingerprint:
    heads = len(Sharding(facts.tp_size, facts.kv_heads).heads_of(0))
    return KvFingerprint(
        model_digest=_model_digest(config.model_config),
        kv_dtype=f"{tensor.dtype}/{config.cache_config.cache_dtype}",
        block_size=facts.block_size,
        layout=f"{cache.kv_cache_layout or HEAD_MAJOR}",
        kv_heads=facts.kv_heads,
        head_bytes=regions[0].block_bytes // facts.block_size // heads,
        num_layers=len({region.layer_name for region in regions}),
        attention_backend=_attention_backends(config, (region.layer_name for region in regions)),
        vllm_version=vllm_version,
        connector_version=CONNECTOR_VERSION,
    )


def _model_digest(model_config: Any) -> str:
    """Digest of the model's configuration and weights: equal for copies of one model at different paths."""
    facts = model_config.hf_text_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        facts.pop(volatile, None)
    facts["quantization"] = model_config.quantization
    facts["weights"] = _weights_digest(Path(model_config.model)) or [model_config.model, str(model_config.revision)]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _weights_digest(folder: Path) -> str:
    """Digest of sizes and samples of the weight files; empty when ``folder`` is not a folder (a hub's name).

    A fine-tuned model has the configuration, tensor names and sizes of its base: only bytes tell them apart.
    """
    digest = hashlib.blake2b(digest_size=12)
    files = sorted(path for path in folder.glob("*") if path.suffix in _WEIGHT_SUFFIXES)
    for path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            for part in range(_SAMPLES):
                file.seek(size * part // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def _attention_backends(config: VllmConfig, layer_names: Iterable[str]) -> str:
    layers = config.compilation_config.static_forward_context
    names = {layers[name].get_attn_backend().get_name() for name in layer_names if name in layers}
    return ",".join(sorted(names))
