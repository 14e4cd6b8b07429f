"""KV as vllm-ascend 0.23.0.post1 itself makes it (``tests/ascend``): read where it lies, or refused by name."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ascend.ranks import memory_of_rank, rank_of, regions_of, views_of, write
from ascend.recorded import Layer, case_of, names
from pdcluster_connector.core.link import plan_link
from pdcluster_connector.core.ranges import GroupSlice, plan_ranges
from pdcluster_connector.vllm.ascend import require_plain_kv
from pdcluster_connector.vllm.facts import _view_of
from pdcluster_connector.vllm.specs import meaning_of
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

READ = {
    "gqa": RegionKind.TOKENS,
    "gqa, half of the heads": RegionKind.TOKENS,
    "gqa, one head on a rank": RegionKind.TOKENS,
    "gqa, wider keys than values": RegionKind.TOKENS,
    "gqa, window on every layer": RegionKind.TOKENS,
    "gqa, window on some layers": RegionKind.TOKENS,
    "gqa, C8 on decode": RegionKind.TOKENS,
    "mla": RegionKind.LATENT,
    "sfa": RegionKind.LATENT,
    "sfa, a layer without indexer": RegionKind.LATENT,
}
"""Cases that are pushed. Several KV groups are refused on vLLM 0.23 elsewhere, whatever their tensors."""
REFUSED = {
    "sfa, indexer in C8": "AscendMLAAttentionSpec with cache_sparse_li_c8 True",
    "sfa, latents in C8": "AscendMLAAttentionSpec with cache_sparse_sfa_c8 True",
}
STATE = "hybrid"


def test_each_recorded_case_is_read_or_refused() -> None:
    assert {*READ, *REFUSED, STATE} == set(names())


def memory_of(region: RegionLayout, heads: int) -> npt.NDArray[np.uint8]:
    """What lies where the region says, as ``[pages, heads, tokens, bytes]``: what other engines take it for."""
    num_pages = region.num_blocks * region.pages_per_block
    raw = (ctypes.c_uint8 * (num_pages * region.page_stride)).from_address(region.base)
    pages = np.ctypeslib.as_array(raw).reshape(num_pages, region.page_stride)[:, : region.page_bytes]
    if region.kind is RegionKind.TOKENS:
        return pages.reshape(num_pages, region.page_tokens, heads, -1).swapaxes(1, 2)
    return pages.reshape(num_pages, heads, region.page_tokens, -1)


@pytest.mark.parametrize("name", READ)
def test_every_token_and_head_is_found_where_vllm_ascend_keeps_it(name: str) -> None:
    case = case_of(name)
    for seed, layer in enumerate(case.layers):
        written, regions = write(layer, seed), regions_of(case, layer)
        assert [region.kind for region in regions] == [READ[name]] * len(layer.held)
        for region, view, content in zip(regions, views_of(layer), written, strict=True):
            assert np.array_equal(memory_of(region, content.shape[1]), content)
            assert np.array_equal(_view_of(view).numpy(), content)


@pytest.mark.parametrize("name", READ)
def test_a_block_is_one_page_of_128_tokens_from_an_aligned_address_on(name: str) -> None:
    case = case_of(name)
    for layer in case.layers:
        for region in regions_of(case, layer):
            assert (region.num_blocks, region.pages_per_block, region.page_tokens) == (case.num_blocks, 1, 128)
            assert region.page_stride == region.page_bytes
            assert region.is_linear
            assert region.base % (2 << 20) == 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_packed_or_quantised_by_their_own_scales_is_refused_by_name(name: str) -> None:
    for layer in case_of(name).layers:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            meaning_of(layer.spec)


def test_state_is_left_as_it_is_and_attention_beside_it_keeps_its_axes() -> None:
    """vLLM 0.23 refuses several groups before; the pages of both are right for the day it does not."""
    attention, state = case_of(STATE).layers
    assert views_of(state)[0] is state.held[0]
    assert [tuple(view.shape[:3]) for view in views_of(attention)] == [(12, 2, 128)] * 2


def test_a_split_of_a_latent_that_the_tensors_do_not_have_is_refused() -> None:
    case = case_of("sfa")
    layer = case.layers[0]
    latent, rope, key = layer.held
    swapped: Any = Layer(layer.name, 0, layer.spec, (latent, key, rope), layer.axes, layer.backend)
    with pytest.raises(ConfigError, match=r"\[512, 128, 64\] numbers .*sparse_head_dim \(512, 64, 128\)"):
        regions_of(case, swapped)


@pytest.mark.parametrize("said", [None, {}, {"enable_kv_nz": False}, {"hamming_sparse": {"enabled": False}}])
def test_an_ordinary_additional_config_is_accepted(said: object) -> None:
    require_plain_kv(said)


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ({"enable_kv_nz": True}, "enable_kv_nz is True.*start decode without it"),
        ({"hamming_sparse": {"enabled": True}}, "hamming_sparse is .*start both without it"),
    ],
)
def test_what_tensors_do_not_say_is_refused_with_the_cure(said: object, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        require_plain_kv(said)


OURS, THEIRS = (1, 4, 2, 7), (9, 3, 5, 6)
"""A prompt's blocks on prefill and on decode."""


def push(prefill: RankLayout, decode: RankLayout) -> None:
    """Every byte that a lane would write, without a lane."""
    link = plan_link(prefill, decode)
    part = GroupSlice(0, 128 * len(OURS), OURS, THEIRS)
    for copy in link.copies:
        assert not copy.is_resharded
        ranges = plan_ranges(link.shapes[copy.shape], part)
        places = (ranges.source.tolist(), ranges.target.tolist(), ranges.num_bytes.tolist())
        for source, target, num_bytes in zip(*places, strict=True):
            ctypes.memmove(copy.target_base + target, copy.source_base + source, num_bytes)


@pytest.mark.parametrize(
    ("name", "prefill_tp", "decode_tp"),
    [
        *(
            (name, *pair)
            for name in ("mla", "sfa", "sfa, a layer without indexer")
            for pair in ((4, 1), (1, 2), (3, 2))
        ),
        *((name, 1, 1) for name in READ if name != "gqa, window on some layers"),
    ],
)
def test_what_prefill_holds_of_a_prompt_is_in_decodes_blocks_after_a_push(
    name: str, prefill_tp: int, decode_tp: int
) -> None:
    prefill = [rank_of(name, rank, prefill_tp, content=7) for rank in range(prefill_tp)]
    for rank in range(decode_tp):
        layout, case, _ = rank_of(name, rank, decode_tp, content=None)
        for source, _, _ in prefill:
            push(source, layout)
        for layer, written in zip(case.layers, prefill[0][2], strict=True):
            for view, content in zip(views_of(layer), written, strict=True):
                held = _view_of(view).numpy()
                assert np.array_equal(held[list(THEIRS)], content[list(OURS)])
                assert not held[[0, 1, 2, 4, 7, 8, 10, 11]].any()


@pytest.mark.parametrize("name", READ)
def test_memory_can_be_registered_from_addresses_that_an_npu_takes(name: str) -> None:
    """2 MiB: each tensor has room before it, and its storage is registered from the first such address on."""
    layout, case, _ = rank_of(name, 0, 1, content=None)
    memory = memory_of_rank(layout, case)
    spans = memory.aligned_spans(2 << 20)
    assert len(spans) == len(layout.regions)
    for region in layout.regions:
        assert any(at <= region.base and region.base + region.span_bytes <= at + size for at, size in spans)
