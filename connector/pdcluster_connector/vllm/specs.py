"""The meaning of vLLM's KV cache specs, and whether a layer's tensors have the axes that its spec says.

    attention, latent   one tensor [pages, KV heads, tokens, content], or several that share the content among them
    state               one tensor [blocks, 1, 1, bytes], or one [blocks, *shape] for each shape of the spec

Byte counts alone cannot tell heads from tokens: vllm-ascend 0.23 keeps ``[blocks, tokens, KV heads, content]``, whose
pages have the same length. So a tensor whose axes are in doubt is refused, before any byte is pushed.

Source of truth: vLLM 0.32 ``v1/kv_cache_interface.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Final

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from pdcluster_connector.vllm.versions import RELEASE
from pdcluster_protocol.errors import ConfigError

TOKEN_MAJOR: Final = frozenset({"LBNHC", "BLNHC"})
"""The layouts in which all heads of a token lie side by side. Ascend's kernels want one of them."""

_PUSHED: Final = (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
"""Specs that a push can move; any other is refused at start."""

_SPLIT: Final = "sparse_head_dim"
"""A field of vllm-ascend 0.23's ``AscendMLAAttentionSpec``: how many numbers of a token each tensor of a layer has
(latent, rotated part, indexer's key). It changes no meaning if the tensors are split that way, which ``require_axes``
checks."""

_CURE: Final = "serve this model without prefill/decode separation"


def meaning_of(spec: KVCacheSpec) -> type[KVCacheSpec]:
    """The kind of KV that ``spec`` is: one of vLLM's own classes.

    A plugin's class counts as the kind that it derives from if each field that it adds has its default, or is known to
    change no meaning.

    Raises:
        ConfigError: No push can move this kind, or a field has a value whose meaning is not known here.
    """
    kind = next((known for known in type(spec).__mro__ if known in _PUSHED), None)
    if kind is None or any(_is_vllms(between) for between in _made_from(spec, kind)):
        known = ", ".join(sorted(known.__name__ for known in _PUSHED))
        raise ConfigError(
            f"the model keeps KV as {type(spec).__name__}, which PDClusterConnector 0.1 cannot push (it knows "
            f"{known}): {_CURE}"
        )
    if said := _unknown_to(spec, kind):
        raise ConfigError(
            f"the model keeps KV as {type(spec).__name__} with {', '.join(said)}, whose meaning PDClusterConnector 0.1 "
            f"does not know (it is made from {kind.__name__}): {_CURE}"
        )
    return kind


def require_axes(
    name: str, spec: KVCacheSpec, held: Sequence[torch.Tensor], num_blocks: int, layout: str | None
) -> None:
    """The tensors of layer ``name`` have the axes that its spec says. ``layout``: the name of the layout that vLLM
    declares; None: vLLM declares none.

    Raises:
        ConfigError: An axis has another size, strides contradict ``layout``, or heads cannot be told from tokens.
    """
    if isinstance(spec, MambaSpec):
        _require_state(name, spec, held, num_blocks)
    elif isinstance(spec, AttentionSpec):
        _require_cells(name, spec, held, num_blocks)
        _require_no_doubt(name, spec, held, num_blocks, layout)


def _made_from(spec: KVCacheSpec, kind: type[KVCacheSpec]) -> Sequence[type]:
    """The class of ``spec`` and its base classes up to ``kind``, without ``kind``."""
    ancestors = type(spec).__mro__
    return ancestors[: ancestors.index(kind)]


def _is_vllms(cls: type) -> bool:
    """Whether the class is vLLM's own. A class of vLLM's that derives from a known kind is a kind not known here."""
    return cls.__module__.partition(".")[0] == "vllm"


def _unknown_to(spec: KVCacheSpec, kind: type[KVCacheSpec]) -> list[str]:
    """The fields of ``spec`` by which its pages may differ from those of ``kind``, each as name and value."""
    known = {field.name for field in dataclasses.fields(kind)}
    said = [
        field.name
        for field in dataclasses.fields(spec)
        if field.name not in known and field.name != _SPLIT and not _is_default(field, spec)
    ]
    if isinstance(spec, AttentionSpec):
        # A token may not have one slot for each KV head: nvfp4 keeps heads of K and V apart, others all heads in two.
        said += ["num_head_slots"] if getattr(spec, "num_head_slots", None) not in (None, spec.num_kv_heads) else []
        # ``tokens_per_state`` was called ``compress_ratio`` before vLLM 0.29.
        older, newer = getattr(spec, "compress_ratio", 1), getattr(spec, "tokens_per_state", 1)
        ratios = {"compress_ratio": older, "tokens_per_state": newer}
        said += [name for name, ratio in ratios.items() if ratio != 1 and name not in said]
    return [f"{field} {getattr(spec, field)}" for field in said]


def _is_default(field: dataclasses.Field[object], spec: KVCacheSpec) -> bool:
    value = getattr(spec, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _require_cells(name: str, spec: AttentionSpec, held: Sequence[torch.Tensor], num_blocks: int) -> None:
    """Each tensor is [pages, KV heads, tokens, content]; all tensors together have the content of a cell."""
    for tensor in held:
        pages = _pages_per_block(tensor, num_blocks)
        said = (num_blocks * pages, spec.num_kv_heads, spec.block_size // pages if pages else 0)
        if tensor.dim() != 4 or not pages or spec.block_size % pages or tuple(tensor.shape[:3]) != said:
            raise ConfigError(
                f"layer {name} has KV of shape {tuple(tensor.shape)}, but its {type(spec).__name__} says {num_blocks} "
                f"blocks of {spec.num_kv_heads} KV heads and {spec.block_size} tokens, which are pushed as [pages, KV "
                f"heads, tokens, content] only: use vLLM's own attention backends, or {_CURE}"
            )
    content_bytes = sum(tensor.shape[3] * tensor.element_size() for tensor in held)
    if content_bytes != (said_bytes := _cell_bytes(spec)):
        raise ConfigError(
            f"layer {name} has {content_bytes} bytes for each token and KV head in {len(held)} tensors, but its "
            f"{type(spec).__name__} says {said_bytes}: use vLLM's own attention backends, or {_CURE}"
        )
    split, contents = getattr(spec, _SPLIT, None), [tensor.shape[3] for tensor in held]
    if split is not None and contents != [part for part in split if part]:
        raise ConfigError(
            f"layer {name} has {contents} numbers for each token in its tensors, but its {type(spec).__name__} says "
            f"{_SPLIT} {split}: {_CURE}"
        )


def _cell_bytes(spec: AttentionSpec) -> int:
    """The bytes of one token and KV head, K and V together."""
    if RELEASE.names_layouts:
        return int(spec.state_content_size_bytes)
    return int(spec.real_page_size_bytes // (spec.block_size * spec.num_kv_heads))


def _pages_per_block(tensor: torch.Tensor, num_blocks: int) -> int:
    """Pages in a block; 0: blocks are not whole pages."""
    pages = tensor.shape[0] if tensor.dim() else 0
    return 0 if pages % num_blocks else pages // num_blocks


def _require_no_doubt(
    name: str, spec: AttentionSpec, held: Sequence[torch.Tensor], num_blocks: int, layout: str | None
) -> None:
    """Where sizes cannot tell heads from tokens, vLLM's declared layout does. Strides never contradict that layout.

    A declared layout is about the one tensor that vLLM itself makes, with a cell's whole content. It does not say the
    axes of several tensors of a layer.
    """
    for tensor in held:
        heads, tokens = tensor.shape[1:3]
        if 1 in (heads, tokens):
            continue
        is_declared = layout is not None and len(held) == 1
        if heads == tokens and not is_declared:
            raise ConfigError(
                f"layer {name} has KV of shape {tuple(tensor.shape)} and {num_blocks} blocks with {heads} KV heads and "
                f"pages of as many tokens: which axis is which cannot be known (its {type(spec).__name__} declares no "
                "layout): choose another --block-size"
            )
        is_by_token = tensor.stride(2) >= tensor.stride(1)
        if layout is not None and is_by_token != (layout in TOKEN_MAJOR):
            raise ConfigError(
                f"layer {name} has KV of shape {tuple(tensor.shape)} and strides {tensor.stride()}, which is not the "
                f"layout {layout} that vLLM declares: use vLLM's own attention backends, or {_CURE}"
            )


def _require_state(name: str, spec: MambaSpec, held: Sequence[torch.Tensor], num_blocks: int) -> None:
    """The layer has one tensor of whole states, or one tensor for each part of a state; a block is one state."""
    whole = (num_blocks, 1, 1, spec.state_content_size_bytes)
    is_whole = len(held) == 1 and _bytes_shape(held[0]) == whole
    parts = [(num_blocks, *shape) for shape in spec.shapes]
    is_parted = [(tuple(t.shape), t.dtype) for t in held] == list(zip(parts, spec.dtypes, strict=True))
    if not (is_whole or is_parted):
        shapes = ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in held)
        said = ", ".join(f"{shape} of {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        raise ConfigError(
            f"layer {name} has state of shape {shapes}, but its {type(spec).__name__} says {num_blocks} blocks of "
            f"{said} ({sum(prod(s) * d.itemsize for s, d in zip(spec.shapes, spec.dtypes, strict=True))} bytes): use "
            f"vLLM's own layers, or {_CURE}"
        )


def _bytes_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size()) if tensor.dim() else ()
