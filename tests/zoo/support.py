"""What works, with which model, and the test that proves it: the data of ``docs/support.md``, and its text.

A unit test holds that the page is fresh, that every test named here exists and that no pool of ``cases.py`` is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from versions import page as versions

PAIRS: Final = "tests/integration/test_support_tp.py::test_every_pair_of_tp_1_2_4_answers_like_a_single_engine"
ODD_PAIRS: Final = (
    "tests/integration/test_support_tp.py::test_tp_sizes_that_do_not_divide_each_other_answer_like_a_single_engine"
)
GATHERED: Final = (
    "tests/integration/test_support_tp.py::test_engines_whose_small_strips_are_gathered_answer_like_a_single_engine"
)
POOL: Final = "tests/integration/test_support_models.py::test_a_pool_answers_like_a_single_engine"
REFUSALS: Final = "tests/integration/test_support_refusals.py::"
ADAPTERS: Final = "tests/integration/test_adapters.py::"
LAW: Final = "tests/property/test_link.py::test_every_decode_rank_gets_each_of_its_bytes_exactly_once"
RESHARD_PUSH: Final = "tests/integration/test_reshard_push.py::"
RESHARDER: Final = "tests/integration/test_resharder.py::"
ASCEND: Final = "tests/integration/test_ascend.py::"
READ: Final = "tests/unit/connector/vllm/test_ascend.py::"
RANGES: Final = "tests/unit/connector/core/test_ranges.py::"
WATERMARK: Final = "tests/unit/connector/core/test_watermark.py::"
STATE: Final = "tests/unit/connector/vllm/test_state.py::"
V2: Final = "tests/integration/test_v2_runner.py::"
FINGERPRINT: Final = "tests/unit/protocol/test_fingerprint.py::"
START: Final = "tests/unit/connector/vllm/test_options.py::"
MESSAGES: Final = "tests/integration/test_anthropic_sdk.py::"
EXACT: Final = "tests/integration/test_exact.py::"
LOCAL: Final = "tests/integration/test_local_prefill.py::"
IMAGES: Final = "tests/integration/test_images.py::"


class Where(Enum):
    """What a proof runs on."""

    ENGINES = "vLLM engines on a CPU"
    CORES = "the cores"
    PROCESSES = "real processes, no engine"
    ASCEND = "real processes, in the tensors that vllm-ascend 0.23 makes; no NPU"
    READ = "reading, in the tensors that vllm-ascend 0.23 makes"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the page. ``proofs``: pytest's names, without parameters but for the pools of ``cases.py``."""

    model: str
    feature: str
    where: Where
    proofs: tuple[str, ...]
    note: str = ""


def pools(*names: str) -> tuple[str, ...]:
    return tuple(f"{POOL}[{name}]" for name in names)


_ENGINES: Final = Where.ENGINES
_ALONE: Final = (
    "answers are equal; the first guesses of each answer are worse, for they are made without the prompt's KV"
)
PARALLEL: Final = (
    Row("Llama, 8, 4, 2 and 1 KV heads", "TP 1, 2, 4 to TP 1, 2, 4", _ENGINES, (PAIRS,), "all 36 pairs"),
    Row("Llama, 2 KV heads", "TP 1 to 2, small strips gathered first", _ENGINES, (GATHERED,), "`make test-all`"),
    Row("Llama, 6 KV heads", "TP 3 to 2, TP 2 to 3", _ENGINES, (ODD_PAIRS,)),
    Row("Llama", "pipeline prefill 2 to 1, TP 2, pipeline 2", _ENGINES,
        pools("pipeline 2 to 1", "pipeline 2 to tp 2", "pipeline 2 to 2")),
    Row("Llama", "data parallel prefill, data parallel decode; TP 4 to data parallel 2 of TP 2", _ENGINES,
        pools("data parallel prefill", "data parallel decode", "tp 4 to data parallel 2 of tp 2")),
    Row("Llama", "prefill TP 2 over two nodes (`--nnodes 2`, a headless worker) to 1", _ENGINES,
        ("tests/integration/test_two_nodes.py::"
         "test_an_engine_over_two_nodes_prefills_and_a_lost_node_is_one_clear_error",)),
)  # fmt: skip
MODELS: Final = (
    Row("Mistral", "sliding window; TP 2 to 1", _ENGINES, pools("mistral", "mistral 2 to 1")),
    Row("Gemma 2", "two groups that share memory; TP 1 to 2", _ENGINES, pools("gemma2 1 to 2")),
    Row("Gemma 3", "three groups that share memory; TP 2 to 1", _ENGINES, pools("gemma3", "gemma3 2 to 1")),
    Row("Gemma 3", "pipeline stages that each lack a group's layers; pipeline 2 to 1", _ENGINES,
        pools("gemma3 pipeline 2 to 1")),
    Row("Gemma 3n", "layers that share KV; TP 1 to 2", _ENGINES, pools("gemma3n 1 to 2")),
    Row("Mixtral", "experts; TP 1 to 2", _ENGINES, pools("mixtral 1 to 2")),
    Row("Qwen3-MoE", "experts; TP 2 to 1", _ENGINES, pools("qwen3-moe 2 to 1")),
    Row("DeepSeek-V3", "MLA and experts; TP 2 to 1, 1 to 2, 2 to 2", _ENGINES,
        pools("mla", "mla 2 to 1", "mla 1 to 2", "mla 2 to 2"),
        "vLLM's CPU kernels give no chunked prefill and no prefix cache"),
    Row("Qwen3-Next", "gated delta net and attention; TP 2 to 1, 1 to 2, 2 to 2; with and without prefix caching",
        _ENGINES,
        pools("delta net", "delta net without cache", "delta net 2 to 1", "delta net 1 to 2", "delta net 2 to 2"),
        "bfloat16; state leaves at the end of a step: [0021](decisions/0021-state-at-unequal-tp.md)"),
    Row("Mamba2", "state only; TP 2 to 1, 1 to 2, 2 to 2", _ENGINES,
        pools("mamba2", "mamba2 2 to 1", "mamba2 1 to 2", "mamba2 2 to 2")),
    Row("Qwen2-VL", "images; positions that depend on them (M-RoPE)", _ENGINES,
        (IMAGES + "test_chats_with_images_answer_like_a_single_engine",
         IMAGES + "test_an_image_behind_a_url_is_pushed_if_both_engines_get_the_same_one_and_never_if_not",
         IMAGES + "test_other_apis_bring_images_too"),
        "[0045](decisions/0045-images.md)"),
)  # fmt: skip
OPTIONS: Final = (
    Row("Llama", "prefix caching on both, one or no side; chunked prefill", _ENGINES,
        (EXACT + "test_200_prompts_at_concurrency_16_answer_like_a_single_engine", *pools("no cache"))),
    Row("Llama", "compiled engines", _ENGINES,
        (EXACT + "test_compiled_engines_answer_like_a_single_compiled_engine",)),
    Row("every one on this page", "vLLM's V2 model runner with asynchronous scheduling, as on CUDA", _ENGINES,
        (V2 + "test_answers_failures_retries_and_every_kind_of_kv_on_the_v2_runner",
         V2 + "test_bytes_and_preemption_on_the_v2_runner"),
        "its Triton kernels in Triton's interpreter; without CUDA graphs"),
    Row("one of each kind of KV; speculation on decode alone", "few missing tokens are computed by decode itself, more "
        "are pushed (`min_push_tokens`)", _ENGINES,
        (LOCAL + "test_pushed_and_local_prompts_answer_like_a_single_engine",
         LOCAL + "test_local_prompts_that_are_preempted_are_computed_again_and_answer_the_same"), "`make test-all`"),
    Row("Llama", "the content of each push is compared, and pushed again where it differs (`content_check`)", _ENGINES,
        ("tests/integration/test_broken.py::test_content_that_is_wrong_is_pushed_again_and_the_answer_is_exact",
         "tests/integration/test_broken.py::"
         "test_content_that_is_always_wrong_is_recomputed_and_never_answered_from"),
        "100,000 injected faults over TP 1, 2, 4 to TP 1, 2, 4: `docs/reports/content-100000.md`"),
    Row("Llama", "Anthropic's Messages API, streamed or not, with tools and Claude Code's requests", _ENGINES,
        (f"{MESSAGES}test_an_answer_is_the_single_engines_byte_for_byte",
         f"{MESSAGES}test_an_answer_that_decode_gives_up_is_no_answer",
         "tests/contract/test_messages.py::test_the_fakes_stream_is_vllms_byte_for_byte"),
        "engines of vLLM 0.32; the API of 0.23 to 0.31 and 0.33 was read in their wheels"),
    Row("Llama", "`vllm bench serve`, LangChain", _ENGINES,
        ("tests/integration/test_vllm_bench.py::test_vllm_bench_serve_has_all_its_answers",
         "tests/integration/test_langchain.py::test_langchain_says_the_same_of_a_pool_and_of_one_engine"),
        "vLLM 0.32, langchain-openai 1.7"),
    Row("any", "vllm-ascend 0.23's own connector behind our router (`--engine-dialect vllm-ascend`)", Where.PROCESSES,
        ("tests/contract/test_vllm_ascend.py::test_the_released_connector_is_served_and_the_fake_posts_what_it_posts",
         "tests/integration/test_router_vllm_ascend.py::"
         "test_a_prefill_that_fails_ends_decode_and_the_client_gets_one_error"),
        "its released scheduler half in vLLM 0.23's scheduler; its workers are played; no NPU"),
    Row("Llama", "speculation by prompt lookup (ngram), on both engines or on decode alone", _ENGINES,
        pools("ngram", "ngram on decode alone")),
    Row("Llama", "speculation by a draft model; TP 1 to 2", _ENGINES, pools("draft model", "draft model 1 to 2"),
        "the same draft model on both engines"),
    Row("Llama", "speculation by an EAGLE head", _ENGINES, pools("eagle"), "the same head on both engines"),
    Row("DeepSeek-V3", "speculation by its own layers (MTP)", _ENGINES, pools("mtp")),
    Row("Llama", "speculation by a draft model or an EAGLE head on decode alone; TP 1 to 2, pipeline prefill 2 to 1",
        _ENGINES, pools("draft model on decode alone", "draft model on decode alone 1 to 2", "eagle on decode alone",
                        "eagle on decode alone, pipeline 2 to 1"), _ALONE),
    Row("DeepSeek-V3", "speculation by its own layers (MTP) on decode alone; TP 1 to 2", _ENGINES,
        pools("mtp on decode alone", "mtp on decode alone 1 to 2"), _ALONE),
    Row("Llama", "fp8 KV (e4m3, e5m2); TP 2 to 1", _ENGINES, pools("fp8", "fp8 2 to 1"), "needs AVX-512 on x86"),
    Row("Llama", "blocks of 32 tokens on both engines", _ENGINES, pools("block 32")),
    Row("Llama", "LoRA adapters: replaced in place, dropped and read again", _ENGINES,
        (ADAPTERS + "test_decode_never_uses_kv_of_weights_that_it_has_replaced",
         ADAPTERS + "test_an_adapter_that_decode_must_read_again_is_judged_by_the_files_that_it_will_read"),
        "vLLM's prefix cache keeps the old weights: [what to do](operations.md#lora-adapters-whose-weights-change)"),
)  # fmt: skip
NOT_ON_CPU: Final = (
    Row("any", "different block sizes, where one divides the other", Where.CORES,
        (LAW, RANGES + "test_a_page_that_is_cut_leaves_row_by_row"),
        "CPU kernels keep K of a whole page transposed: refused there; MLA blocks are always 16 on CPU"),
    Row("DeepSeek-R1", "TP 16 to data parallel 4 of TP 4", Where.CORES,
        ("tests/unit/connector/core/test_tp_mapping.py::test_sixteen_ranks_of_a_latent_deal_it_out_to_four", LAW),
        "engines run TP 4 to data parallel 2 of TP 2, see above"),
    Row("any", "windows before which prefill has recycled blocks, or left them in its prefix cache",
        Where.CORES, (LAW,)),
    Row("GQA, MLA, SFA in bf16", "token-major KV with equal TP (Ascend)", Where.ASCEND,
        (ASCEND + "test_a_prompt_arrives_in_decodes_blocks",
         READ + "test_every_token_and_head_is_found_where_vllm_ascend_keeps_it")),
    Row("MLA, SFA in bf16", "any TP (Ascend)", Where.READ,
        (READ + "test_what_prefill_holds_of_a_prompt_is_in_decodes_blocks_after_a_push",)),
    Row("GQA", "token-major KV, TP 1 to 2 (Ascend)", Where.ASCEND,
        (ASCEND + "test_each_decode_rank_of_two_gets_its_heads_of_a_prefill_engine_of_one",)),
    Row("any", "token-major KV with unequal TP (Ascend): the resharder", Where.PROCESSES,
        (RESHARD_PUSH + "test_engines_of_any_tp_get_their_heads_in_chunks_and_together",
         RESHARD_PUSH + "test_four_ranks_feed_one_and_two_with_other_blocks_and_pages",
         RESHARDER + "test_decode_has_the_reference_bytes_after_several_layers_and_steps",
         RESHARDER + "test_ranks_that_own_nothing_of_a_step_take_part_and_are_told_of_every_region")),
    Row("gated delta net, Mamba2, Mamba1", "state with TP 1, 2, 4, 8 to TP 1, 2, 4, 8; both of vLLM's layouts",
        Where.CORES,
        (STATE + "test_every_decode_rank_gets_each_byte_of_its_state_once_for_all_tp_pairs",),
        "all pairs that the model allows, in vLLM's own shapes and sharding of weights. vLLM chooses block sizes "
        "by a rank's state. If neither of two block sizes divides the other, the handshake refuses them: give both one "
        "`--block-size`"),
    Row("Qwen3-Next", "speculation by its own layer (MTP)", Where.CORES,
        (STATE + "test_every_decode_rank_gets_each_byte_of_its_state_once_for_all_tp_pairs",
         WATERMARK + "test_blocks_for_guesses_are_not_the_state",
         REFUSALS + "test_vllms_cpu_engine_ends_at_a_step_of_one_prompt_token_with_mtp_beside_state"),
        "vLLM 0.32's CPU engine ends at one prompt token in a step, and with prefix caching at each request"),
    Row("MLA", "prefix caching and chunked prefill", Where.CORES,
        (LAW, RANGES + "test_shares_of_a_prompt_are_its_stripes_whatever_the_steps_were")),
)  # fmt: skip
NOT_RUN: Final = (
    Row("MoE", "experts spread over ranks (`--enable-expert-parallel`, EP)", _ENGINES,
        (REFUSALS + "test_vllms_own_cpu_kernel_ends_where_experts_are_spread_over_ranks",),
        "vLLM 0.32's CPU kernel crashes, also in a plain engine: TP 2 and data parallel 2, Mixtral and Qwen3-MoE. "
        "Experts keep no KV, and nothing is refused, also on one role alone; run it on your device before you rely "
        "on it"),
)  # fmt: skip
REFUSED: Final = (
    Row("any", "a LoRA adapter of other content, or used with other options, on each side", _ENGINES,
        (ADAPTERS + "test_where_requests_are_to_fail_the_error_names_both_engines_both_contents_and_the_cure",),
        "for each request, before any byte"),
    Row("any", "LoRA files that change while a request with its KV waits for its first step", _ENGINES,
        (ADAPTERS + "test_files_that_change_while_a_request_with_its_kv_waits_for_room_never_mix_with_that_kv",),
        "the request ends before its first token. With `recompute` or several KV groups it goes on, and is counted"),
    Row("any", "another model, weights, dtype, KV dtype, block size or heads on each side", _ENGINES,
        (REFUSALS + "test_engines_that_keep_kv_otherwise_are_refused_with_both_values_before_any_byte",),
        "at the handshake, before any byte"),
    Row("any", "a draft model on prefill alone, or another one on each side", _ENGINES,
        (REFUSALS + "test_a_draft_model_on_prefill_alone_or_another_one_on_decode_is_refused_before_any_byte",),
        "at the handshake, before any byte"),
    Row("any",
        "speculation on decode alone: methods other than ngram, MTP, EAGLE and draft model; any beside recurrent state",
        Where.CORES, (FINGERPRINT + "test_other_differences_of_draft_models_are_refused_with_both_values",),
        "at the handshake, before any byte"),
    Row("any", "Ray (`--distributed-executor-backend ray`, `--data-parallel-backend ray`)", Where.CORES,
        (START + "test_what_an_engine_may_not_be_is_refused_by_the_name_of_its_option",),
        "at the engine's start; never run with it"),
    Row("any", "scales of KV that each rank works out (`--calculate-kv-scales`, vLLM 0.23 to 0.27)", Where.CORES,
        (START + "test_no_engine_starts_that_works_out_scales_of_its_kv_by_itself",), "at the engine's start"),
    Row("LFM2, Kimi Linear, MiniMax-01", "state of other kinds (short convolution, KDA, linear) with unequal TP",
        Where.CORES, (STATE + "test_what_vllm_does_not_say_has_no_runs_and_is_refused_with_both_tp_sizes",),
        "at the handshake, before any byte"),
    Row("Mamba2", "state of another type on each side", _ENGINES,
        (REFUSALS + "test_recurrent_state_of_another_type_is_refused_before_any_byte",),
        "at the handshake, before any byte"),
    Row("LongRoPE (Llama)", "another longest request on each side, where vLLM takes other factors by it", _ENGINES,
        (REFUSALS + "test_keys_with_other_positions_are_refused_before_any_byte",),
        "at the handshake, before any byte"),
    Row("any", "windows with larger blocks on decode than on prefill", Where.CORES,
        ("tests/property/test_link.py::test_a_window_is_refused_exactly_where_prefill_lacks_a_token_of_some_prompt",),
        "at the handshake"),
    Row("any", "context parallel engines, kv_role kv_both", _ENGINES,
        (REFUSALS + "test_an_engine_that_cannot_take_part_does_not_start",), "at the engine's start"),
    Row("any", "latents in NZ (`enable_kv_nz`), `hamming_sparse` (Ascend)", Where.READ,
        (READ + "test_what_tensors_do_not_say_is_refused_with_the_cure",), "at the engine's start"),
    Row("SFA", "KV or indexer of 8 bits (Ascend)", Where.READ,
        (READ + "test_what_is_packed_or_quantised_by_their_own_scales_is_refused_by_name",), "at the engine's start"),
)  # fmt: skip
SECTIONS: Final = (
    ("Ranks", "Every pair of a prefill engine and a decode engine, each split in its own way.", PARALLEL),
    ("Models", "One for each way in which vLLM 0.32 keeps KV.", MODELS),
    ("Options", "The same option on both engines, unless it says otherwise.", OPTIONS),
    ("What no CPU kernel runs", "Proven below the engine.", NOT_ON_CPU),
    ("What is not proven", "Seen not to run here.", NOT_RUN),
    ("What is refused", "Both values and the cure are in the error.", REFUSED),
)
_HEAD: Final = """# What works, and how we know

Written by `python -m tests.zoo` from `tests/zoo/support.py`; a test holds it fresh. The models are tiny ones with four
layers, made by the tests. Where a proof runs on vLLM engines, a prefill engine, a decode engine and the router answer
greedily, token for token like one plain engine. Prompts fill less than a block, one block, several, or several steps;
then come longer ones that begin alike. Every answer came by a push, none was recomputed, and every block came back.
CPU kernels for MLA, and for Qwen3-Next at unequal TP, round otherwise by themselves. There only clear choices must be
equal. A choice is clear with a margin in log probability of 0.1 for MLA, and of 0.25 for Qwen3-Next.

No test of this page runs on a GPU. A Llama ran three times on an H200, with vLLM 0.26 and 0.23:
[report](reports/h200.md). Leave `--enforce-eager` out between GPUs over TCP: an engine of one rank then computes in
the stream in which Mooncake copies.
"""


def render() -> str:
    """The page."""
    return "\n".join([_HEAD, *(line for section in SECTIONS for line in _section(*section)), *versions.section()])


def rows() -> Iterator[Row]:
    for _, _, section in SECTIONS:
        yield from section


def _section(title: str, text: str, section: Sequence[Row]) -> Iterator[str]:
    yield from (f"## {title}", "", text, "", "| model | feature | proven on | by | note |", "|---|---|---|---|---|")
    for row in section:
        proofs = "<br>".join(f"`{proof}`" for proof in row.proofs)
        yield f"| {row.model} | {row.feature} | {row.where.value} | {proofs} | {row.note} |"
    yield ""
