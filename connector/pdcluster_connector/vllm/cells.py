"""KV of vLLM before 0.29 in the axes of newer versions: ``[pages, KV heads, tokens, content]``.

Older attention backends choose the order of axes (vLLM 0.23 ``v1/attention/backends/*.py``, ``get_kv_cache_shape``): K
and V side by side in a cell (CPU), as an axis of two (FlashAttention), or a latent without heads (MLA). vllm-ascend
keeps each part in a tensor of its own: K and V, or a latent, its rotated part and an indexer's key. This module asks
the backend for the shape of its KV, for numbers of pages, tokens and heads that cannot be confused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from pdcluster_protocol.errors import ConfigError

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionBackend

LayerKv: TypeAlias = torch.Tensor | Sequence[torch.Tensor]

_PAGES: Final = 10_007
_TOKENS: Final = 16 * 7 * 11
_HEADS: Final = 5
_HEAD_SIZE: Final = 64
_PARTS: Final = 2
"""K and V."""


def in_new_axes(layers: Mapping[str, AttentionLayerBase], kv_caches: Mapping[str, LayerKv]) -> dict[str, LayerKv]:
    """Views of the same memory in the new axes; ``layers``: vLLM's layers by name (``static_forward_context``).

    Raises:
        ConfigError: A backend's tensor has an axis that is not known here.
    """
    return {name: _views(name, layers[name], held) if name in layers else held for name, held in kv_caches.items()}


def _views(name: str, layer: AttentionLayerBase, held: LayerKv) -> LayerKv:
    if not hasattr(layer, "get_attn_backend") or (shape := _shape_of(layer.get_attn_backend())) is None:
        return held
    is_whole, backend = isinstance(held, torch.Tensor), layer.get_attn_backend().get_name()
    parts: list[torch.Tensor] = [held] if isinstance(held, torch.Tensor) else list(held)
    order = shape if is_whole else tuple(size for size in shape if size != _PARTS)
    if not _is_known(shape) or any(part.dim() != len(order) for part in parts):
        raise ConfigError(
            f"layer {name} has KV of shape {', '.join(str(tuple(part.shape)) for part in parts)}, and its attention "
            f"backend {backend} says {shape} for {_PAGES} pages of {_TOKENS} tokens: choose another "
            "--attention-backend, or use vLLM 0.29 or newer"
        )
    if is_whole and _PARTS in shape:
        parts = list(parts[0].unbind(shape.index(_PARTS)))
    left = [size for size in shape if size != _PARTS]
    return tuple(_in_order(part, left) for part in parts)


def _shape_of(backend: type[AttentionBackend]) -> tuple[int, ...] | None:
    """The shape of the backend's KV; None: it is a backend of recurrent state, which has no such axes."""
    try:
        return tuple(backend.get_kv_cache_shape(_PAGES, _TOKENS, _HEADS, _HEAD_SIZE))
    except NotImplementedError:
        return None


def _is_known(shape: Sequence[int]) -> bool:
    return shape.count(_PAGES) == 1 and shape.count(_TOKENS) == 1


def _in_order(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    pages, tokens = shape.index(_PAGES), shape.index(_TOKENS)
    if _HEADS not in shape:
        return part.permute(pages, tokens, *_others(shape, pages, tokens))[:, None]
    heads = shape.index(_HEADS)
    return part.permute(pages, heads, tokens, *_others(shape, pages, heads, tokens))


def _others(shape: Sequence[int], *known: int) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in known]
