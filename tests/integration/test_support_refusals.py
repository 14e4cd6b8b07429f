"""What does not fit is refused, with both values and the cure: at the handshake before any byte, or at start."""

from __future__ import annotations

import dataclasses

import pytest

from integration.harness import Harness, HttpError, Server, complete
from pdcluster_cli.processes.engines import PoolRole
from pdcluster_cli.processes.waiting import EngineDied
from zoo import pools
from zoo.cases import MTP, TP2, draft_model, eagle
from zoo.models import LONG_ROPE, MAMBA2, MIXTRAL, QWEN3_NEXT, llama
from zoo.pools import ONE, Case, Shape
from zoo.weights import ensure_model

pytestmark = pytest.mark.engines

LLAMA = llama(4)


def others() -> list[tuple[Case, tuple[str, ...]]]:
    """A decode engine beside a plain Llama of float32 in blocks of 128, and what is said about it."""
    cases = [
        (
            Case(LLAMA, ("--block-size", "32")),
            ("pages of 128 tokens on prefill, 32 on decode", "start both with the same --block-size"),
        ),
        (
            Case(LLAMA, ("--dtype", "bfloat16")),
            ("prefill 'torch.float32/auto', decode 'torch.bfloat16/auto'", "start both with the same --dtype"),
        ),
        (
            Case(LLAMA, ("--kv-cache-dtype", "fp8")),
            ("prefill 'torch.float32/auto', decode 'torch.float32/fp8'", "and --kv-cache-dtype"),
        ),
        (Case(llama(2)), ("model_digest: prefill '", "kv_heads: prefill (4,), decode (2,)", "serve the same model")),
        (
            Case(dataclasses.replace(LLAMA, name="llama-4kv-tuned", seed=8)),
            ("differ in model_digest: prefill '", "serve the same model and revision, with the same"),
        ),
    ]
    return [(case, words) for case, words in cases if case.runs_here]


def refusal(harness: Harness, prefill: Server, decode: Server) -> str:
    with harness.router([prefill], [decode]) as router, pytest.raises(HttpError) as refused:
        complete(router.url, [5] * 300, 4)
    assert refused.value.status == 502
    assert f"prefill engine {prefill.name} and decode engine {decode.name}" in refused.value.body
    return refused.value.body


def require_nothing_written(prefill: Server) -> None:
    pushes = prefill.read_trace("push", 1)
    assert {(line["outcome"], line["num_bytes"], line["writes"]) for line in pushes} == {("failed", 0, 0)}


def test_engines_that_keep_kv_otherwise_are_refused_with_both_values_before_any_byte(harness: Harness) -> None:
    plans = [pools.plan_engine(harness, PoolRole.PREFILL, Case(LLAMA), ONE)]
    plans += [pools.plan_engine(harness, PoolRole.DECODE, case, ONE) for case, _ in others()]
    with harness.start(*plans) as (prefill, *decodes):
        for decode, (_, words) in zip(decodes, others(), strict=True):
            told = refusal(harness, prefill, decode)
            assert [word for word in words if word not in told] == [], told
        require_nothing_written(prefill)
        pools.require_no_block_in_use((prefill, *decodes))


def test_a_draft_model_on_prefill_alone_or_another_one_on_decode_is_refused_before_any_byte(harness: Harness) -> None:
    plans = [pools.plan_engine(harness, PoolRole.PREFILL, Case(LLAMA, draft_model()), ONE)]
    plans += [pools.plan_engine(harness, PoolRole.DECODE, Case(LLAMA, args), ONE) for args in ((), eagle())]
    with harness.start(*plans) as (prefill, *decodes):
        for decode, theirs in zip(decodes, ("decode ''", "decode 'eagle "), strict=True):
            told = refusal(harness, prefill, decode)
            words = ("differ in draft: prefill 'draft_model ", theirs, "give both the same --speculative-config")
            assert [word for word in words if word not in told] == [], told
        require_nothing_written(prefill)


@pytest.mark.slow
def test_vllms_own_cpu_kernel_ends_where_experts_are_spread_over_ranks(harness: Harness) -> None:
    """A plain engine, without a connector: nothing can be proven of ``--enable-expert-parallel`` on a CPU."""
    case = Case(MIXTRAL, ("--enable-expert-parallel",))
    engine = harness.single_engine(case.common(), model=ensure_model(case.recipe), parallelism=TP2.parallelism)
    with engine as server, pytest.raises(HttpError) as ended:
        complete(server.url, [5] * 40, 4)
    assert ended.value.status == 500
    log = server.log_path.read_text()
    assert "Segfault encountered" in log
    assert "cpu_fused_moe" in log


def test_recurrent_state_of_another_type_is_refused_before_any_byte(harness: Harness) -> None:
    """As many bytes, and each means something else: no count tells."""
    ssm = ("--mamba-ssm-cache-dtype", "float32")
    cases = (Case(MAMBA2, ("--mamba-cache-dtype", dtype, *ssm)) for dtype in ("float16", "bfloat16"))
    roles = (PoolRole.PREFILL, PoolRole.DECODE)
    plans = [pools.plan_engine(harness, role, case, ONE) for role, case in zip(roles, cases, strict=True)]
    with harness.start(*plans) as (prefill, decode):
        told = refusal(harness, prefill, decode)
        assert "state: prefill 'torch.float16,torch.float32/SD', decode 'torch.bfloat16,torch.float32/SD'" in told
        assert "start both with the same --mamba-cache-dtype" in told
        require_nothing_written(prefill)


@pytest.mark.slow
def test_vllms_cpu_engine_ends_at_a_step_of_one_prompt_token_with_mtp_beside_state(harness: Harness) -> None:
    """A plain engine, without a pool. Decode's first step is such a one: no CPU engine can take a hand-over here.

    When this fails, vLLM has mended it: the pool belongs into ``zoo.cases``.
    """
    case = Case(QWEN3_NEXT, ("--dtype", "bfloat16", "--no-enable-prefix-caching", *MTP), concurrency=1)
    with pytest.raises(HttpError, match="EngineCore encountered an issue"):
        pools.ask_single(harness, case, pools.make_prompts((pools.CHUNK + 1,), seed=11))


def test_keys_with_other_positions_are_refused_before_any_byte(harness: Harness) -> None:
    """One model, one shape of KV: only the longest request differs, and by it vLLM chooses LongRoPE's factors."""
    cases = {PoolRole.PREFILL: Case(LONG_ROPE), PoolRole.DECODE: Case(LONG_ROPE, ("--max-model-len", "1024"))}
    with harness.start(*(pools.plan_engine(harness, role, case, ONE) for role, case in cases.items())) as servers:
        told = refusal(harness, *servers)
        assert "positions: prefill 'long factors of LongRoPE', decode 'short factors of LongRoPE'" in told
        assert "start both with the same --max-model-len" in told
        require_nothing_written(servers[0])


@pytest.mark.parametrize(
    ("shape", "kv_transfer", "words"),
    [
        pytest.param(ONE, {"kv_role": "kv_both"}, "kv_role is 'kv_both': start a prefill engine with", id="role"),
        pytest.param(
            Shape(tp=2, args=("--decode-context-parallel-size", "2")),
            {},
            "--decode-context-parallel-size is 2: PDClusterConnector 0.1 needs 1",
            id="context parallel",
        ),
    ],
)
def test_an_engine_that_cannot_take_part_does_not_start(
    harness: Harness, shape: Shape, kv_transfer: dict[str, object], words: str
) -> None:
    case = Case(llama(1))
    plan = dataclasses.replace(pools.plan_engine(harness, PoolRole.PREFILL, case, shape), kv_transfer=kv_transfer)
    with pytest.raises(EngineDied):
        harness.start(plan).__enter__()
    assert words in plan.log_path.read_text()
