"""What ``tensors.json`` says, as specs and tensors on this machine: shapes, strides and places as vllm-ascend has them.

Needs no vllm-ascend. Any supported vLLM: of a spec, the fields that its kind has there.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from vllm.v1 import kv_cache_interface

_SAID: Final = json.loads(Path(__file__).with_name("tensors.json").read_text())
_ALIGNMENT: Final = 2 << 20
_OF_THE_ENGINE: Final = frozenset({"kv_quant_mode", "mamba_type"})
"""Fields whose types differ from version to version, and of which no case has another than the default."""


@dataclass(frozen=True)
class Backend:
    """An attention backend, as far as it says axes. Of state: none."""

    name: str
    shape: tuple[int | str, ...]

    def get_name(self) -> str:
        return self.name

    def get_kv_cache_shape(self, pages: int, tokens: int, heads: int, content: int) -> tuple[int, ...]:
        if not self.shape:
            raise NotImplementedError
        sizes = {"pages": pages, "tokens": tokens, "heads": heads, "content": content}
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.shape)


@dataclass(frozen=True)
class Layer:
    """One layer of a rank. ``held``: what ``register_kv_caches`` gets for it; ``axes``: of each of its tensors."""

    name: str
    group: int
    spec: Any
    held: tuple[torch.Tensor, ...] | list[torch.Tensor]
    axes: tuple[str, ...]
    backend: Backend

    def get_attn_backend(self) -> Backend:
        return self.backend


@dataclass(frozen=True)
class Case:
    num_blocks: int
    block_tokens: tuple[int, ...]
    """Of each KV group."""
    layers: tuple[Layer, ...]


def names() -> list[str]:
    return list(_SAID["cases"])


def case_of(name: str) -> Case:
    """Its tensors are new ones, all zero."""
    said = _SAID["cases"][name]
    groups = {layer: number for number, group in enumerate(said["groups"]) for layer in group["layers"]}
    layers = tuple(_layer(layer, groups[layer], it) for layer, it in said["layers"].items())
    return Case(said["num_blocks"], tuple(group["block_size"] for group in said["groups"]), layers)


def _layer(name: str, group: int, said: dict[str, Any]) -> Layer:
    sizes = {one["storage"]: one["storage_bytes"] for one in said["tensors"]}
    storages = {number: torch.zeros(size, dtype=torch.int8) for number, size in sizes.items()}
    held = [_tensor(storages[one["storage"]], one) for one in said["tensors"]]
    backend = Backend(said["backend"], tuple(said["backend_shape"]))
    axes = tuple(said["tensors"][0]["axes"])
    return Layer(name, group, _spec(said["spec"]), tuple(held) if said["held_as"] == "tuple" else held, axes, backend)


def _tensor(raw: torch.Tensor, said: dict[str, Any]) -> torch.Tensor:
    dtype, shape, strides = _dtype(said["dtype"]), said["shape"], said["strides"]
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    first = -raw.data_ptr() % _ALIGNMENT + said["bytes_after_alignment"]
    return raw[first : first + numbers * dtype.itemsize].view(dtype).as_strided(shape, strides)


def _spec(said: dict[str, Any]) -> Any:
    kind = getattr(kv_cache_interface, said["made_from"])
    known = {field.name for field in dataclasses.fields(kind)} - _OF_THE_ENGINE
    if issubclass(kind, kv_cache_interface.MLAAttentionSpec):
        known.discard("head_size_v")  # vLLM 0.32: 0; 0.23: the same as that of K. A latent has one content.
    fields = {name: _value(value) for name, value in said["fields"].items() if name in known | said["added"].keys()}
    return _class(kind, said)(**fields)


def _class(kind: Any, said: dict[str, Any]) -> Any:
    """vLLM's own, or one that a plugin has made from it."""
    if said["class"] == said["made_from"]:
        return kind
    added = [(name, Any, dataclasses.field(default=_value(value))) for name, value in said["added"].items()]
    made = dataclasses.make_dataclass(said["class"], added, bases=(kind,), frozen=True, kw_only=True)
    made.__module__ = said["module"]
    return made


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_value, value))
    return _dtype(value) if isinstance(value, str) and value.startswith("torch.") else value


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
