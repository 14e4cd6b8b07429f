"""What an engine may not be is said at its start, with the setting, its value and the cure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from integration.ranks import Shape, engine_facts, fingerprint_of
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.engine_facts import EngineFacts, Memory
from pdcluster_connector.settings import PushTiming, Settings
from pdcluster_connector.vllm.cells import LayerKv
from pdcluster_connector.vllm.facts import (
    _group,
    _role,
    _specs_of,
    own_layers,
    page_tokens_of,
    read_engine_facts,
    read_regions,
    read_token_memory,
)
from pdcluster_connector.vllm.fingerprint import _positions, _state
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout
from unit.connector.vllm.configs import a_config


def test_a_role_that_is_none_of_ours_is_refused() -> None:
    assert _role("kv_producer") is Role.PREFILL
    with pytest.raises(ConfigError, match=r"kv_both.*kv_producer.*kv_consumer"):
        _role("kv_both")


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer"])
@pytest.mark.parametrize(
    ("host", "additional_config", "told"),
    [
        ("fd00::7", {}, "address is fd00::7.*IPv4 only: set VLLM_HOST_IP"),
        ("127.0.0.1", {"enable_kv_nz": True}, "enable_kv_nz is True"),
    ],
    ids=["an address of IPv6", "KV that vllm-ascend would keep in another order"],
)
def test_what_no_engine_may_be_is_refused_at_start_with_the_cure(
    kv_role: str, host: str, additional_config: dict[str, object], told: str
) -> None:
    config = a_config(kv_role, {"push": "serial", "host": host})
    config.additional_config = additional_config
    with pytest.raises(ConfigError, match=told):
        read_engine_facts(config, SimpleNamespace(kv_cache_groups=[]))


def by_token(pages: int, heads: int, tokens: int, content: int) -> torch.Tensor:
    """[pages, heads, tokens, content] as vLLM's LBNHC has it in memory."""
    return torch.arange(pages * tokens * heads * content).view(pages, tokens, heads, content).transpose(1, 2)


def facts() -> EngineFacts:
    return engine_facts(Role.PREFILL, Shape(kv_heads=4), Settings())


def model_config(heads: int, *, has_prefix_cache: bool = True) -> Any:
    """Of an engine whose model has ``heads`` KV heads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(is_attention_free=False, use_mla=False, get_total_num_kv_heads=lambda: heads),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(enable_prefix_caching=has_prefix_cache),
    )


def regions_of(tensor: torch.Tensor, num_blocks: int, block_size: int) -> list[RegionLayout]:
    """As read of an engine of TP 1 whose model has as many KV heads as the tensor."""
    config = model_config(tensor.shape[1])
    _, heads, _, content = tensor.shape
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=content // 2, dtype=tensor.dtype)
    cache = SimpleNamespace(num_blocks=num_blocks, kv_cache_layout=None)
    return list(read_regions("a", 0, spec, tensor, cache, facts(), config))


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.zeros(6, 4, 16, 8), RegionKind.HEADS),
        (by_token(6, 4, 16, 8), RegionKind.TOKENS),
        (torch.zeros(6, 1, 16, 8), RegionKind.HEADS),
        (by_token(6, 1, 16, 8), RegionKind.TOKENS),
    ],
)
def test_token_major_kv_is_told_by_its_strides_also_with_one_head(tensor: torch.Tensor, kind: RegionKind) -> None:
    (region,) = regions_of(tensor, 3, 32)
    assert region.kind is kind
    assert (region.heads, region.page_tokens, region.pages_per_block) == (tensor.shape[1], 16, 2)
    assert region.page_stride == region.page_bytes == tensor[0].numel() * tensor.element_size()


ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": torch.float32}
FULL, SLIDING = FullAttentionSpec(**ATTENTION), SlidingWindowSpec(**ATTENTION, sliding_window=40)
CHUNKED = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=48)


@pytest.mark.parametrize("push", PushTiming)
@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize(("spec", "step"), [(FULL, 0), (SLIDING, 1), (CHUNKED, 48)], ids=["full", "sliding", "chunks"])
def test_a_region_says_where_what_prefill_surely_has_may_begin(
    spec: KVCacheSpec, step: int, has_prefix_cache: bool, push: PushTiming
) -> None:
    """However it pushes: blocks before a window may be another request's while a lane reads them."""
    engine = engine_facts(Role.PREFILL, Shape(kv_heads=4), Settings(push=push))
    config = model_config(4, has_prefix_cache=has_prefix_cache)
    cache = SimpleNamespace(num_blocks=3, kv_cache_layout=None)
    (region,) = read_regions("a", 0, spec, torch.zeros(3, 4, 16, 16), cache, engine, config)
    assert region.window_step == step


def test_kv_whose_blocks_are_not_one_run_of_bytes_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"layer a has KV of shape .*VLLM_KV_CACHE_LAYOUT"):
        regions_of(torch.zeros(6, 4, 32, 8)[:, :, ::2], 3, 32)


def test_keys_and_values_of_a_released_vllm_ascend_are_refused_at_start() -> None:
    """Their pages of [tokens, heads] have the bytes of ours: with another TP, heads would be runs of tokens."""
    keys, values = torch.zeros(100, 128, 4, 128), torch.zeros(100, 128, 4, 128)
    spec = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=128, dtype=torch.float32)
    cache = SimpleNamespace(num_blocks=100, kv_cache_layout=None)
    with pytest.raises(ConfigError, match=r"layer a has KV of shape \(100, 128, 4, 128\).*4 KV heads and 128 tokens"):
        list(read_regions("a", 0, spec, (keys, values), cache, facts(), model_config(4)))


def memory_of(tensor: torch.Tensor) -> Memory:
    layout = RankLayout(0, 1, tuple(regions_of(tensor, 3, 32)))
    return Memory(layout, (), fingerprint_of(Shape()))


def test_the_resharder_gets_the_memory_of_token_major_layers_and_nothing_of_others() -> None:
    tensor, cache = by_token(6, 4, 16, 8), SimpleNamespace(kv_cache_layout=None)
    tokens = read_token_memory(facts(), memory_of(tensor), cache, {"a": tensor})
    assert tokens is not None
    assert tokens.group is None
    assert tokens.data[0].data_ptr() == tensor.data_ptr()
    assert tokens.data[0].view(torch.int64).tolist() == list(range(tensor.numel()))
    heads = torch.zeros(6, 4, 16, 8)
    assert read_token_memory(facts(), memory_of(heads), cache, {"a": heads}) is None


def test_a_stage_without_attention_opens_the_group_like_the_others_and_reshards_nothing() -> None:
    nothing = Memory(RankLayout(0, 1, (), 1, 2), (), fingerprint_of(Shape()))
    assert read_token_memory(facts(), nothing, SimpleNamespace(kv_cache_layout="LBNHC"), {}) is None


def interleaved(blocks: int, layers: int) -> list[torch.Tensor]:
    """[blocks, 4 heads, 16 tokens, 8] of each layer as vLLM's BLNHC has them: a block holds a page of every layer."""
    whole = torch.arange(blocks * layers * 16 * 4 * 8).view(blocks, layers, 16, 4, 8)
    return [whole[:, layer].transpose(1, 2) for layer in range(layers)]


def test_reading_interleaved_layers_moves_no_cache() -> None:
    tensors = interleaved(3, 2)
    cache, addresses = SimpleNamespace(kv_cache_layout="BLNHC"), [tensor.data_ptr() for tensor in tensors]
    regions = tuple(region for tensor in tensors for region in regions_of(tensor, 3, 16))
    memory = Memory(RankLayout(0, 1, regions), (), fingerprint_of(Shape()))
    tokens = read_token_memory(facts(), memory, cache, dict(zip("ab", tensors, strict=True)))
    assert tokens is not None
    assert [tensor.data_ptr() for tensor in tensors] == addresses == [tokens.data[i].data_ptr() for i in (0, 1)]
    assert tokens.data[1].view(torch.int64)[-1] == tensors[1].max()


def test_a_layer_that_reads_anothers_kv_is_not_pushed() -> None:
    first, second, state = torch.zeros(6, 4, 16, 8), torch.zeros(6, 4, 16, 8), [torch.zeros(6, 3), torch.zeros(6, 2)]
    groups = [SimpleNamespace(layer_names=["a", "b", "reads a"]), SimpleNamespace(layer_names=["m", "c"])]
    tensors: dict[str, LayerKv] = {"a": first, "b": second, "m": state, "c": first, "reads a": first, "reads b": second}
    own = own_layers(SimpleNamespace(kv_cache_groups=groups), tensors)
    assert list(own) == ["a", "b", "m", "c"], "layers of two groups share memory and have different blocks"


def test_state_of_another_type_is_another_fingerprint() -> None:
    def spec(*dtypes: torch.dtype) -> MambaSpec:
        return MambaSpec(block_size=16, shapes=((2, 3), (4,)), dtypes=dtypes)

    half, brain = _state([spec(torch.float16, torch.float32)]), _state([spec(torch.bfloat16, torch.float32)])
    assert half == "torch.float16,torch.float32/SD"
    assert brain == "torch.bfloat16,torch.float32/SD"
    assert _state([FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)]) == ""


def test_state_of_another_layout_is_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    get_conv_state_layout.cache_clear()
    try:
        assert _state([spec]) == "torch.float32/DS"
    finally:
        get_conv_state_layout.cache_clear()


LONG_ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def model(rope: dict[str, Any] | None = None, *, kind: str = "phi3", **changed: Any) -> Any:
    """A model's configuration, as much of it as counts. ``get_and_verify_max_len``: what ``auto`` is at load."""
    found = {
        "hf_text_config": SimpleNamespace(model_type=kind, rope_parameters=rope),
        "original_max_model_len": 8192,
        "max_model_len": 8192,
        "get_and_verify_max_len": lambda _: 131_072,
        "try_get_generation_config": dict,
        "override_generation_config": {},
    }
    return SimpleNamespace(**{**found, **changed})


@pytest.mark.parametrize(
    "rope", [LONG_ROPE, {"full_attention": LONG_ROPE, "sliding_attention": {"rope_type": "default"}}]
)
@pytest.mark.parametrize(
    ("length", "factors"),
    [
        pytest.param({"max_model_len": 4096}, "short", id="as long as the original"),
        pytest.param({"max_model_len": 4097}, "long", id="longer"),
        pytest.param({"max_model_len": 70_000}, "long", id="much longer, and yet the same"),
        pytest.param({"max_model_len": 900, "original_max_model_len": -1}, "long", id="fitted after layers were made"),
    ],
)
def test_which_factors_longrope_takes_is_part_of_the_fingerprint(
    rope: dict[str, Any], length: dict[str, Any], factors: str
) -> None:
    assert _positions(model(rope, **length)) == f"{factors} factors of LongRoPE"


@pytest.mark.parametrize(
    ("changed", "is_tuned"),
    [
        pytest.param({"max_model_len": 32_768}, False, id="short"),
        pytest.param({"max_model_len": 32_769}, True, id="long"),
        pytest.param({"try_get_generation_config": lambda: {"attn_temperature_tuning": True}}, True, id="by its file"),
        pytest.param(
            {
                "max_model_len": 40_000,
                "try_get_generation_config": lambda: {"attn_temperature_tuning": True},
                "override_generation_config": {"attn_temperature_tuning": False},
            },
            False,
            id="by an option",
        ),
    ],
)
def test_whether_llama_4_tunes_its_temperature_is_part_of_the_fingerprint(
    changed: dict[str, Any], *, is_tuned: bool
) -> None:
    told = _positions(model(kind="llama4_text", **changed))
    assert told == f"attention temperature {'tuned' if is_tuned else 'not tuned'}"


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}, {}, None])
def test_another_longest_request_alone_makes_no_other_fingerprint(rope: dict[str, Any] | None) -> None:
    assert _positions(model(rope)) == ""


@pytest.mark.parametrize("is_uniform", [False, True])
@pytest.mark.parametrize("layers", [[], ["a"]], ids=["another stage's layers", "own layers"])
def test_a_stage_without_a_layer_of_a_group_knows_what_the_group_keeps(layers: list[str], is_uniform: bool) -> None:
    def group(spec: KVCacheSpec) -> KVCacheGroupSpec:
        return KVCacheGroupSpec(layers, UniformTypeKVCacheSpecs(16, {"a": spec}) if is_uniform else spec)

    mamba = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
    assert _group(group(SLIDING)) == KvGroup(16, is_windowed=True)
    assert _group(group(mamba)) == KvGroup(1, is_state=True)
    assert _group(group(FULL)) == KvGroup(16)
    assert _state(_specs_of(group(mamba))) == "torch.float32/SD"


def memory_at(base: int, num_blocks: int, span: tuple[int, int]) -> Memory:
    region = RegionLayout("a", 0, base, num_blocks, 64, 64)
    return Memory(RankLayout(0, 1, (region,)), (span,), fingerprint_of(Shape()))


def test_memory_is_registered_from_an_aligned_address_on() -> None:
    assert memory_at(4096, 2, (4000, 1000)).aligned_spans(1) == ((4000, 1000),)
    assert memory_at(4096, 2, (4000, 1000)).aligned_spans(4096) == ((4096, 904),)


@pytest.mark.parametrize(("base", "num_blocks"), [(4032, 2), (4096, 15)])
def test_kv_outside_of_aligned_memory_is_refused_at_start(base: int, num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"layer a at 0x.* multiple of 4096 bytes.*allocate"):
        memory_at(base, num_blocks, (4000, 1000)).aligned_spans(4096)


def test_pages_are_named_group_by_group() -> None:
    place = (0, 3, 64, 64)
    attention = RegionLayout("a", 1, *place, RegionKind.TOKENS, 4, 16, 2)
    state = RegionLayout("s", 0, *place, RegionKind.STATE, 1, 1)
    groups = (KvGroup(1, is_state=True), KvGroup(32), KvGroup(32))
    assert page_tokens_of(RankLayout(0, 1, (state, attention)), groups) == (1, 16, 1)
