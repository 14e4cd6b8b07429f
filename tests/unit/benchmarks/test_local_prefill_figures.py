"""What streams wait beside a request, and the ratios of both ways."""

from __future__ import annotations

import pytest
from benchmarks.client import Streamed
from benchmarks.local_prefill_figures import Round, Sample, Way, build_cells, longest_wait_s, median_wait_s, sample_of

STREAM = Streamed(0.0, (1.0, 2.0, 5.0, 6.0, 6.5))


@pytest.mark.parametrize(
    ("begun_at", "ended_at", "longest"),
    [(2.5, 5.5, 3.0), (5.2, 5.8, 1.0), (0.0, 9.0, 3.0), (5.0, 6.2, 1.0), (7.0, 8.0, 0.0)],
)
def test_a_step_counts_where_a_part_of_it_lies_beside_the_request(
    begun_at: float, ended_at: float, longest: float
) -> None:
    assert longest_wait_s(STREAM, begun_at, ended_at) == longest


def test_an_undisturbed_step_lies_wholly_within_the_quiet_time() -> None:
    assert median_wait_s([STREAM, STREAM], 1.5, 6.2) == 2.0
    assert median_wait_s([STREAM], 3.0, 4.0) is None
    assert median_wait_s([], 0.0, 9.0) is None


def test_a_sample_is_the_mean_over_the_streams() -> None:
    asked = Streamed(2.5, (5.5, 6.0))
    assert sample_of(asked, [STREAM, Streamed(0.0, (2.0, 3.0, 4.0))]) == Sample(3.0, 2.0)
    assert sample_of(asked, []) == Sample(3.0, None)


def test_ratios_are_of_the_same_round() -> None:
    rounds = [
        Round({Way.PUSHED: Sample(0.04, 0.01), Way.LOCAL: Sample(0.01, 0.02)}, 0.01),
        Round({Way.PUSHED: Sample(0.02, 0.01), Way.LOCAL: Sample(0.02, 0.03)}, 0.01),
    ]
    cells = build_cells(1024, 16, "4 streams", rounds)
    assert cells[:3] == ("1,024", "16", "4 streams")
    assert cells[5] == "0.62 (0.25..1.00)"
    assert cells[-1] == "2.50 (2.00..3.00)"
    alone = build_cells(0, 16, "nothing", [Round({way: Sample(0.01, None) for way in Way}, None)])
    assert alone[-4:] == ("-", "-", "-", "-")
