"""The meaning of an engine's KV, in the terms that two engines compare before a byte is written.

Source of truth: vLLM 0.32 ``config/``, ``v1/kv_cache_interface.py``, ``v1/attention/backends``, and others named below.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from vllm import __version__ as vllm_version
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from pdcluster_connector.vllm.drafts import draft_of, is_draft_layer
from pdcluster_protocol.fingerprint import KvFingerprint

CONNECTOR_VERSION: Final = "0.1.0"
HEAD_MAJOR: Final = "LBHNC"
"""The layout in which a rank's heads are one slice of a block (vLLM 0.32 ``v1/kv_cache_layout.py``)."""
_LLAMA4_LONG_TOKENS: Final = 32_768
_AUTO: Final = -1
"""vLLM's value for ``--max-model-len auto``."""
_VOLATILE: Final = ("_name_or_path", "transformers_version", "max_model_len", "attn_temperature_tuning")
"""Keys of a model's configuration that may differ between engines of one model. vLLM itself writes the last two
(``models/minimax_m2.py``, ``models/llama4.py``)."""

_WEIGHT_SUFFIXES: Final = frozenset((".safetensors", ".bin", ".pt", ".gguf"))
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096
"""Bytes of a sample. An engine reads 64 samples of each weight file, 256 KiB, at its start."""


def head_major(names_layouts: bool) -> str:
    """The layout to ask vLLM for: ``HND`` before layouts had names (vLLM 0.23 ``v1/attention/backends/utils.py``)."""
    return HEAD_MAJOR if names_layouts else "HND"


def read_fingerprint(
    config: VllmConfig,
    kv_cache_layout: str | None,
    specs: Iterable[KVCacheSpec],
    layer_names: Iterable[str],
) -> KvFingerprint:
    """The fingerprint of an engine whose model is loaded. Worker processes only; reads samples of the weight files.

    ``specs``: the kinds of KV of all groups; ``layer_names``: this rank's layers.
    """
    model, draft = config.model_config, draft_of(config)
    own_layers = [name for name in layer_names if not is_draft_layer(config, name)]
    return KvFingerprint(
        model_digest=_model_digest(model),
        kv_dtype=f"{config.model_config.dtype}/{config.cache_config.cache_dtype}",
        layout=f"{kv_cache_layout or HEAD_MAJOR}",
        kv_heads=kv_heads_of(model),
        attention_backend=_attention_backends(config, own_layers),
        vllm_version=vllm_version,
        connector_version=CONNECTOR_VERSION,
        state=_state(specs),
        positions=_positions(model),
        draft=_draft(config),
        draft_heads=kv_heads_of(draft) if draft else (),
    )


def kv_heads_of(*models: ModelConfig) -> tuple[int, ...]:
    """The distinct numbers of KV heads in the models, ascending; 1 for a latent. A model of only state adds none."""
    attending = (model for model in models if not model.is_attention_free)
    return tuple(sorted({1 if model.use_mla else model.get_total_num_kv_heads() for model in attending}))


def _draft(config: VllmConfig) -> str:
    """The method of speculation and the facts that identify its model; empty: no draft model keeps KV."""
    speculative, draft = config.speculative_config, draft_of(config)
    if speculative is None or draft is None:
        return ""
    return " ".join(filter(None, (speculative.method, _model_digest(draft), _positions(draft))))


def _state(specs: Iterable[KVCacheSpec]) -> str:
    """How recurrent state is kept: states of one length may differ in meaning. Empty: the model has no state."""
    dtypes = {",".join(map(str, spec.dtypes)) for spec in specs if isinstance(spec, MambaSpec)}
    return f"{' '.join(sorted(dtypes))}/{get_conv_state_layout()}" if dtypes else ""


def _positions(model_config: ModelConfig) -> str:
    """The choices about positions that vLLM 0.32 makes by an engine's options; empty: the model alone decides."""
    chosen = (*_rope_factors(model_config), *_attention_temperature(model_config))
    return ", ".join(sorted(set(chosen)))


def _rope_factors(model_config: ModelConfig) -> Iterator[str]:
    """The factors of LongRoPE (``model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py``)."""
    rope = getattr(model_config.hf_text_config, "rope_parameters", None) or {}
    # Parameters for all layers, or for each kind of layer.
    for one in (rope, *rope.values()):
        if isinstance(one, Mapping) and one.get("rope_type") == "longrope":
            is_long = _longest_request(model_config) > one["original_max_position_embeddings"]
            yield f"{'long' if is_long else 'short'} factors of LongRoPE"


def _attention_temperature(model_config: ModelConfig) -> Iterator[str]:
    """Whether Llama 4 tunes its attention temperature (``model_executor/models/llama4.py``). Tuning in one layer
    changes the keys of later layers."""
    if str(model_config.hf_text_config.model_type).startswith("llama4"):
        generation = {**model_config.try_get_generation_config(), **model_config.override_generation_config}
        is_tuned = generation.get("attn_temperature_tuning", _longest_request(model_config) > _LLAMA4_LONG_TOKENS)
        yield f"attention temperature {'tuned' if is_tuned else 'not tuned'}"


def _longest_request(model_config: ModelConfig) -> int:
    """The longest request, in tokens, for which the layers were made. ``--max-model-len auto`` later fits the length to
    memory; the layers stay as they are."""
    if model_config.original_max_model_len == _AUTO:
        return int(model_config.get_and_verify_max_len(_AUTO))
    return int(model_config.max_model_len)


def _model_digest(model_config: ModelConfig) -> str:
    """Digest of the model's configuration and weights: equal for copies of one model at different paths."""
    facts = model_config.hf_text_config.to_dict()
    for volatile in _VOLATILE:
        facts.pop(volatile, None)
    facts["quantization"] = model_config.quantization
    facts["weights"] = _weights_digest(Path(model_config.model)) or [model_config.model, str(model_config.revision)]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _weights_digest(folder: Path) -> str:
    """Digest of sizes and samples of the weight files; empty: ``folder`` has none, or is a model's name on a hub.

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
    """The names of the layers' backends, each with the instruction set for which a CPU kernel packs its pages."""
    layers = config.compilation_config.static_forward_context
    known = [layers[name] for name in layer_names if hasattr(layers.get(name), "get_attn_backend")]
    names = {f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '')}".rstrip("/") for layer in known}
    return ",".join(sorted(names))
