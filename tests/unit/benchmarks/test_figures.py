"""Spreads, slopes and tables of all benchmarks."""

from __future__ import annotations

import pytest
from benchmarks.figures import Spread, ms, percent, percentile, ratios, slope, spread, times


def test_a_spread_is_median_and_range() -> None:
    assert spread([3, 1, 2]) == Spread(2, 1, 3)


def test_ratios_compare_within_a_round() -> None:
    assert ratios([2, 6], [1, 2]) == Spread(2.5, 2, 3)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([5.0], 0.99) == 5.0


@pytest.mark.parametrize(
    ("points", "growth"), [([(0, 1), (1, 3), (2, 5)], 2), ([(0, 4), (5, 4)], 0), ([(1, 7)], 0), ([], 0)]
)
def test_a_slope_is_growth_for_each_step(points: list[tuple[float, float]], growth: float) -> None:
    assert slope(points) == pytest.approx(growth)


def test_figures_are_shown_as_median_and_range() -> None:
    figure = Spread(0.9, 0.85, 1.2)
    assert ms(figure) == "900 (850..1,200)"
    assert times(figure) == "0.90 (0.85..1.20)"
    assert percent(figure) == "90% (85%..120%)"
