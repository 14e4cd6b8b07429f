"""What the time-to-first-token benchmark measures is bounded."""

from __future__ import annotations

from benchmarks.ttft_figures import Way
from benchmarks.ttft_plan import Case, Plan


def plan(case_s: float) -> Plan:
    return Plan(("loopback", "1gbit"), (256, 8000), (1, 16), tuple(Way), rounds=5, case_s=case_s)


def test_a_case_has_as_many_rounds_as_fit_but_not_more_than_asked_for() -> None:
    assert plan(100).rounds_of(Case("loopback", 256, 1)) == 5
    assert plan(200).rounds_of(Case("loopback", 8000, 1)) == 3


def test_a_case_that_does_not_fit_once_is_left_out_and_named() -> None:
    cases = list(plan(300).cases_of(("loopback",)))
    assert cases == [
        Case("loopback", 256, 1),
        Case("loopback", 8000, 1),
        Case("loopback", 256, 16),
    ]
    assert list(map(str, plan(300).skipped)) == ["loopback 16 x 8,000 tokens", "1gbit 16 x 8,000 tokens"]
