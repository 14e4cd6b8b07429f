"""What the connector touches though not every supported version of vLLM has it, and what keeps it from being missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pdcluster_connector.vllm.versions import NEWEST, OLDEST, Minor


@dataclass(frozen=True, slots=True)
class Guard:
    """A name of ``stubs/`` that is missing in some versions."""

    opens: str
    """A field of ``VllmRelease``, also after ``not``, or a hook that vLLM calls: where it is so, the name is there."""
    where: frozenset[str]
    """The functions that name it: each stands behind the guard."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An attribute that is asked for by its name as text, which mypy does not see."""

    why: str
    names: tuple[str, ...] = ()
    """As in ``stubs/``; none where it is of none of vLLM's own classes."""
    since: Minor = OLDEST
    until: Minor = NEWEST


_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults"
_BACKEND: Final = "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_attn_backend"
_SPECS: Final = "vllm.v1.kv_cache_interface:"
_OUTPUT: Final = "vllm.v1.core.sched.output:"
_LORA: Final = "vllm.lora.request:"
_RESULTS: Final = Guard("get_transfer_results", frozenset({"connector.get_transfer_results"}))
_TABLES: Final = Guard("resolves_block_ids", frozenset({"block_tables.resolved"}))
_CONTENT: Final = frozenset({"specs._cell_bytes", "specs._require_state"})

GUARDED: Final[Mapping[str, Guard]] = {
    _BASE: _RESULTS,
    f"{_OUTPUT}KVConnectorBlockState": Guard("resolves_block_ids", frozenset()),
    f"{_OUTPUT}KVConnectorBlockState.resolve_block_ids": _TABLES,
    f"{_OUTPUT}SchedulerOutput.kv_connector_block_state": _TABLES,
    "vllm.v1.attention.backend:AttentionBackend.get_kv_cache_shape": Guard(
        "not names_layouts", frozenset({"cells._shape_of"})
    ),
    # The second function fills KVConnectorTransferResults, where the name is the same.
    "vllm.v1.outputs:KVConnectorOutput.failed_recving": Guard(
        "fails_by_request", frozenset({"decode_hooks._take_failed", "connector.get_transfer_results"})
    ),
    f"{_SPECS}AttentionSpec.state_content_size_bytes": Guard("names_layouts", _CONTENT),
    # A model with recurrent state is refused at start before failures are told by request.
    f"{_SPECS}MambaSpec.state_content_size_bytes": Guard("fails_by_request", _CONTENT),
    f"{_SPECS}KVCacheConfig.kv_cache_layout": Guard("names_layouts", frozenset({"facts._layout_of"})),
    f"{_SPECS}KVCacheConfig.transfer_group_ids": Guard(
        "get_loaded_kv_cache_group_ids", frozenset({"connector.get_loaded_kv_cache_group_ids"})
    ),
}
"""A class that is missing stands for its members."""

ASKED: Final[Mapping[str, Asked]] = {
    "getattr(cache_config, 'calculate_kv_scales', False)": Asked(
        "newer ones take scales from the checkpoint alone",
        ("vllm.config:CacheConfig.calculate_kv_scales",),
        until=(0, 27),
    ),
    "getattr(spec, 'num_head_slots', None)": Asked(
        "before, each KV head had a slot", (f"{_SPECS}AttentionSpec.num_head_slots",), since=(0, 28)
    ),
    "getattr(spec, 'compress_ratio', 1)": Asked(
        "the older name of the next one",
        (f"{_SPECS}MLAAttentionSpec.compress_ratio", f"{_SPECS}SlidingWindowMLASpec.compress_ratio"),
        until=(0, 28),
    ),
    "getattr(spec, 'tokens_per_state', 1)": Asked(
        "the newer name", (f"{_SPECS}AttentionSpec.tokens_per_state",), since=(0, 29)
    ),
    "hasattr(layer, 'get_attn_backend')": Asked("layers without attention are in the same mapping", (_BACKEND,)),
    "hasattr(layers.get(name), 'get_attn_backend')": Asked("the same", (_BACKEND,)),
    "getattr(request, 'tensorizer_config_dict', None)": Asked(
        "the folder that tensorizer reads in place of the adapter's",
        (f"{_LORA}LoRARequest.tensorizer_config_dict",),
        until=(0, 31),
    ),
    "getattr(spec, field)": Asked("a name that the lines above have found on it"),
    "getattr(spec, field.name)": Asked("what dataclasses.fields has said"),
    "getattr(spec, _SPLIT, None)": Asked("vllm-ascend's: vLLM's own specs have none"),
    "getattr(layer, 'isa', '')": Asked("set from outside by vLLM's CPU attention alone"),
    "getattr(layer, 'norm', None)": Asked("of Mamba2 layers; without it their state goes between equal TP sizes alone"),
    "getattr(getattr(layer, 'norm', None), 'n_groups', None)": Asked("the same"),
    "getattr(model_config.hf_text_config, 'rope_parameters', None)": Asked("of transformers: not every model has it"),
}
