"""A spec is judged by what it means, and a tensor by the axes that its spec says: bytes alone cannot tell them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from pdcluster_connector.vllm.specs import meaning_of, require_axes
from pdcluster_protocol.errors import ConfigError

BLOCKS = 10
ATTENTION: dict[str, Any] = {"block_size": 128, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}
LATENT: dict[str, Any] = {"block_size": 128, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
FULL, MLA = FullAttentionSpec(**ATTENTION), MLAAttentionSpec(**LATENT)
SLIDING, SLIDING_MLA = (
    SlidingWindowSpec(**ATTENTION, sliding_window=64),
    SlidingWindowMLASpec(**LATENT, sliding_window=64),
)
CHUNKED = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)
STATE = MambaSpec(block_size=128, shapes=((3, 32), (4, 8, 16)), dtypes=(torch.bfloat16, torch.float32))


@dataclass(frozen=True, kw_only=True)
class PluginMLASpec(MLAAttentionSpec):  # type: ignore[misc]  # vllm has no types
    """As vllm-ascend's ``AscendMLAAttentionSpec`` adds to vLLM's."""

    scale_dim: int = 0
    scale_dtype: torch.dtype = torch.int8
    cache_sparse_sfa_c8: bool = False
    store_on_host: bool = False


@dataclass(frozen=True, kw_only=True)
class PluginWindowSpec(SlidingWindowMLASpec):  # type: ignore[misc]  # vllm has no types
    """As vllm-ascend's ``AscendSlidingWindowMLASpec``: a block holds fewer tokens than it says."""

    compress_ratio: int = 1


@dataclass(frozen=True, kw_only=True)
class NoDefaultSpec(FullAttentionSpec):  # type: ignore[misc]  # vllm has no types
    """A plugin's field that must be given always means something."""

    ring: int


@pytest.mark.parametrize("spec", [FULL, SLIDING, CHUNKED, MLA, SLIDING_MLA, STATE])
def test_each_kind_of_vllm_that_is_pushed_is_itself(spec: KVCacheSpec) -> None:
    assert meaning_of(spec) is type(spec)


def test_a_plugins_class_whose_fields_change_nothing_is_the_kind_that_it_is_made_from() -> None:
    assert meaning_of(PluginMLASpec(**LATENT)) is MLAAttentionSpec
    assert meaning_of(PluginWindowSpec(**LATENT, sliding_window=64)) is SlidingWindowMLASpec


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (PluginMLASpec(**LATENT, scale_dim=1), "PluginMLASpec with scale_dim 1, .*made from MLAAttentionSpec"),
        (PluginMLASpec(**LATENT, cache_sparse_sfa_c8=True, store_on_host=True), "cache_sparse_sfa_c8 True, store_on_h"),
        (PluginWindowSpec(**LATENT, sliding_window=64, compress_ratio=4), "compress_ratio 4"),
        (NoDefaultSpec(**ATTENTION, ring=8), "ring 8"),
        (FullAttentionSpec(**ATTENTION, num_head_slots=8), "FullAttentionSpec with num_head_slots 8"),
        (MLAAttentionSpec(**LATENT, tokens_per_state=4), "tokens_per_state 4"),
        (FullAttentionSpec(**ATTENTION, tokens_per_state=Fraction(1, 2)), "tokens_per_state 1/2"),
    ],
)
def test_a_field_that_changes_the_meaning_is_refused_by_name(spec: KVCacheSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"{said}.*without prefill/decode separation"):
        meaning_of(spec)


def test_slots_that_are_the_kv_heads_change_nothing() -> None:
    assert meaning_of(FullAttentionSpec(**ATTENTION, num_head_slots=4)) is FullAttentionSpec


@pytest.mark.parametrize("spec", [HiddenStateCacheSpec(**LATENT), RSWASpec(**ATTENTION, rswa_window=4)])
def test_a_kind_of_vllms_own_that_is_not_known_is_refused_whatever_it_derives_from(spec: KVCacheSpec) -> None:
    with pytest.raises(ConfigError, match=rf"keeps KV as {type(spec).__name__}, which .* cannot push"):
        meaning_of(spec)


def contiguous(*shapes: Iterable[int]) -> list[torch.Tensor]:
    return [torch.zeros(tuple(shape), dtype=torch.bfloat16) for shape in shapes]


def test_what_vllm_itself_makes_has_the_axes_of_its_spec() -> None:
    require_axes("a", FULL, contiguous((BLOCKS, 4, 128, 128)), BLOCKS, "LBHNC")
    require_axes("a", FULL, [contiguous((BLOCKS, 128, 4, 128))[0].transpose(1, 2)], BLOCKS, "LBNHC")
    require_axes("a", SLIDING, contiguous((2 * BLOCKS, 4, 64, 128)), BLOCKS, "LBHNC")
    require_axes("a", MLA, contiguous((BLOCKS, 1, 128, 576)), BLOCKS, "LBHNC")
    require_axes("a", FULL, contiguous((BLOCKS, 4, 128, 64), (BLOCKS, 4, 128, 64)), BLOCKS, None)


# As ``_reshape_kv_cache_tensors`` of vllm-ascend 0.23 makes them (``worker/model_runner_v1.py``).
ASCEND = {
    "keys and values": (FULL, contiguous((BLOCKS, 128, 4, 64), (BLOCKS, 128, 4, 64))),
    "a sliding window": (SLIDING, contiguous((BLOCKS, 128, 4, 64), (BLOCKS, 128, 4, 64))),
    "chunks": (CHUNKED, contiguous((BLOCKS, 128, 4, 64), (BLOCKS, 128, 4, 64))),
    "latent and rope of MLA": (PluginMLASpec(**LATENT), contiguous((BLOCKS, 128, 1, 512), (BLOCKS, 128, 1, 64))),
    "kernel blocks of 64": (FULL, contiguous((2 * BLOCKS, 64, 4, 64), (2 * BLOCKS, 64, 4, 64))),
    "both in one": (FULL, contiguous((2, BLOCKS, 128, 4, 64))),
}


@pytest.mark.parametrize("layout", [None, "LBHNC", "LBNHC"])
@pytest.mark.parametrize("name", ASCEND)
def test_a_released_vllm_ascends_tensors_are_refused_with_both_values(name: str, layout: str | None) -> None:
    spec, held = ASCEND[name]
    with pytest.raises(
        ConfigError, match=r"layer a has KV of shape \(.*says 10 blocks of [14] KV heads and 128 tokens"
    ):
        require_axes("a", spec, held, BLOCKS, layout)


@pytest.mark.parametrize(
    "shape", [(BLOCKS, 4, 64, 128), (BLOCKS, 2, 128, 128), (15, 4, 128, 128), (BLOCKS, 4, 128), ()]
)
def test_an_axis_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="layer a has KV of shape"):
        require_axes("a", FULL, contiguous(shape), BLOCKS, None)


@pytest.mark.parametrize("held", [[64], [128, 64], [64, 32]])
def test_content_of_another_length_is_refused_with_both_values(held: list[int]) -> None:
    with pytest.raises(ConfigError, match=rf"layer a has {2 * sum(held)} bytes .* in {len(held)} tensors.* says 256"):
        require_axes("a", FULL, contiguous(*((BLOCKS, 4, 128, content) for content in held)), BLOCKS, None)


SQUARE = FullAttentionSpec(**{**ATTENTION, "block_size": 4})


def test_as_many_heads_as_tokens_are_told_apart_by_what_vllm_declares_only() -> None:
    whole, halves = contiguous((BLOCKS, 4, 4, 128)), contiguous((BLOCKS, 4, 4, 64), (BLOCKS, 4, 4, 64))
    require_axes("a", SQUARE, whole, BLOCKS, "LBHNC")
    for held, layout in ((whole, None), (halves, None), (halves, "LBHNC")):
        with pytest.raises(ConfigError, match=r"4 KV heads and pages of as many tokens.*cannot be known.*--block-size"):
            require_axes("a", SQUARE, held, BLOCKS, layout)


@pytest.mark.parametrize("spec", [FULL, SQUARE])
def test_strides_that_contradict_the_declared_layout_are_refused(spec: FullAttentionSpec) -> None:
    tokens = spec.block_size
    by_token = contiguous((BLOCKS, tokens, 4, 128))[0].transpose(1, 2)
    with pytest.raises(ConfigError, match=r"layer a .* strides .* not the layout LBHNC that vLLM declares"):
        require_axes("a", spec, [by_token], BLOCKS, "LBHNC")
    with pytest.raises(ConfigError, match="not the layout LBNHC that vLLM declares"):
        require_axes("a", spec, contiguous((BLOCKS, 4, tokens, 128)), BLOCKS, "LBNHC")


def test_one_head_or_tokens_one_by_one_leave_no_doubt() -> None:
    require_axes("a", MLA, contiguous((BLOCKS, 1, 128, 576)), BLOCKS, "LBNHC")
    require_axes("a", FULL, contiguous((128 * BLOCKS, 4, 1, 128)), BLOCKS, "LBNHC")


def state(*parts: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in parts]


CONV, SSM = ((BLOCKS, 3, 32), torch.bfloat16), ((BLOCKS, 4, 8, 16), torch.float32)


def test_state_is_whole_or_one_tensor_for_each_part_of_its_spec() -> None:
    require_axes("m", STATE, state(((BLOCKS, 1, 1, 2 * 3 * 32 + 4 * 4 * 8 * 16), torch.int8)), BLOCKS, "LBHNC")
    require_axes("m", STATE, state(CONV, SSM), BLOCKS, None)


@pytest.mark.parametrize(
    "held",
    [
        state(SSM, CONV),
        state(CONV),
        state(CONV, SSM, SSM),
        state(((BLOCKS, 32, 3), torch.bfloat16), SSM),
        state(((BLOCKS, 3, 32), torch.float16), SSM),
        state(((2 * BLOCKS, 3, 32), torch.bfloat16), SSM),
        state(((BLOCKS, 1, 1, 2239), torch.int8)),
        state(((BLOCKS, 1, 2, 1120), torch.int8)),
    ],
)
def test_state_of_another_shape_is_refused_with_both_values(held: list[torch.Tensor]) -> None:
    with pytest.raises(
        ConfigError, match=r"layer m has state of shape .*says 10 blocks of \(3, 32\) of torch.bfloat16"
    ):
        require_axes("m", STATE, held, BLOCKS, None)
