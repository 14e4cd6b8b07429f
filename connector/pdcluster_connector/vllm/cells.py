"""KV of vLLM before 0.29 in the axes of newer ones: ``[pages, KV heads, tokens, content]``.

Older attention backends choose the order of axes (vLLM 0.23 ``v1/attention/backends/*.py``, ``get_kv_cache_shape``): K
and V side by side in a cell (CPU), as an axis of two (FlashAttention), or a latent without heads (MLA). Which axis is
which is asked of the backend with numbers that cannot be confused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from pdcluster_protocol.errors import ConfigError

LayerKv: TypeAlias = torch.Tensor | Sequence[torch.Tensor]

_PAGES: Final = 10_007
_TOKENS: Final = 16 * 7 * 11
_HEADS: Final = 5
_HEAD_SIZE: Final = 64
_PARTS: Final = 2
"""K and V."""


def in_new_axes(layers: Mapping[str, Any], kv_caches: Mapping[str, LayerKv]) -> dict[str, LayerKv]:
    """Views of the same memory; ``layers``: vLLM's attention layers by name (``static_forward_context``).

    Raises:
        ConfigError: A backend's tensor has an axis that is not known here.
    """
    return {name: _views(name, layers[name], held) if name in layers else held for name, held in kv_caches.items()}


def _views(name: str, layer: Any, held: LayerKv) -> LayerKv:
    if not isinstance(held, torch.Tensor) or not hasattr(layer, "get_attn_backend"):
        return held
    backend = layer.get_attn_backend()
    shape = tuple(backend.get_kv_cache_shape(_PAGES, _TOKENS, _HEADS, _HEAD_SIZE))
    if len(shape) != held.dim() or shape.count(_PAGES) != 1 or shape.count(_TOKENS) != 1:
        raise ConfigError(
            f"layer {name} has KV of shape {tuple(held.shape)}, and its attention backend {backend.get_name()} says "
            f"{shape} for {_PAGES} pages of {_TOKENS} tokens: choose another --attention-backend, or use vLLM 0.29 or "
            "newer"
        )
    parts = held.unbind(shape.index(_PARTS)) if _PARTS in shape else (held,)
    left = [size for size in shape if size != _PARTS]
    return tuple(_in_order(part, left) for part in parts)


def _in_order(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    pages, tokens = shape.index(_PAGES), shape.index(_TOKENS)
    if _HEADS not in shape:
        return part.permute(pages, tokens, *_others(shape, pages, tokens))[:, None]
    heads = shape.index(_HEADS)
    return part.permute(pages, heads, tokens, *_others(shape, pages, heads, tokens))


def _others(shape: Sequence[int], *known: int) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in known]
