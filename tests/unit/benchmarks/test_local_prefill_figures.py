"""What streams wait beside a request, and the ratios of both ways."""

from __future__ import annotations

import pytest
from benchmarks.client import Streamed
from benchmarks.local_prefill_figures import Round, Sample, Way, build_cells, median_wait_s, sample_of

STREAM = Streamed(0.0, (1.0, 2.0, 5.0, 6.0, 6.5))


@pytest.mark.parametrize(
    ("begun_at", "ended_at", "longest"),
    [(2.5, 5.5, 3.0), (5.2, 5.8, 1.0), (0.0, 9.0, 3.0), (5.0, 6.2, 1.0), (7.0, 8.0, 0.0)],
)
def test_a_step_counts_where_a_part_of_it_lies_beside_the_request_and_a_sample_is_the_mean_over_the_streams(
    begun_at: float, ended_at: float, longest: float
) -> None:
    asked = Streamed(begun_at, (ended_at, 99.0))
    still = Streamed(0.0, (0.0,))
    assert sample_of(asked, [STREAM, still]) == Sample(ended_at - begun_at, longest / 2)
    assert sample_of(asked, []) == Sample(ended_at - begun_at, None)


def test_an_undisturbed_step_lies_wholly_within_the_quiet_time() -> None:
    assert median_wait_s([STREAM, STREAM], 1.5, 6.2) == 2.0
    assert median_wait_s([STREAM], 3.0, 4.0) is None


def test_ratios_are_of_the_same_round() -> None:
    rounds = [
        Round({Way.PUSHED: Sample(0.04, 0.01), Way.LOCAL: Sample(0.01, 0.02)}, 0.01),
        Round({Way.PUSHED: Sample(0.02, 0.01), Way.LOCAL: Sample(0.02, 0.03)}, 0.01),
    ]
    assert build_cells(1024, 16, "4 streams", rounds) == (
        *("1,024", "16", "4 streams", "30.0 (20.0..40.0)", "15.0 (10.0..20.0)", "0.62 (0.25..1.00)"),
        *("10.0 (10.0..10.0)", "10.0 (10.0..10.0)", "25.0 (20.0..30.0)", "2.50 (2.00..3.00)"),
    )
    alone = build_cells(0, 16, "nothing", [Round({way: Sample(0.01, None) for way in Way}, None)])
    assert alone[-4:] == ("-", "-", "-", "-")
