"""What the time-to-first-token benchmark measures is bounded."""

from __future__ import annotations

from benchmarks.starter import DEEP_KV, WIDE_KV
from benchmarks.ttft_figures import Way
from benchmarks.ttft_plan import KV_BYTES_PER_TOKEN, Plan


def test_a_case_has_as_many_rounds_as_fit_and_one_that_does_not_fit_once_is_left_out_and_named() -> None:
    plan = Plan(("loopback", "1gbit"), (256, 8000), (1, 16), tuple(Way), rounds=5, case_s=200)
    rounds = {str(case): plan.rounds_of(case) for case in plan.cases_of(("loopback",))}
    assert rounds == {"loopback 1 x 256 tokens": 5, "loopback 1 x 8,000 tokens": 3, "loopback 16 x 256 tokens": 5}
    assert list(map(str, plan.skipped)) == ["loopback 16 x 8,000 tokens", "1gbit 16 x 8,000 tokens"]


def test_both_models_have_the_kv_that_the_plan_counts_with() -> None:
    assert {WIDE_KV.kv_token_bytes, DEEP_KV.kv_token_bytes} == {KV_BYTES_PER_TOKEN}
