"""Placement: the engine with the least to do, and whom to leave out."""

from __future__ import annotations

import pytest

from pdcluster_router.core.placement import LeastTokens, Load, eligible


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([Load(5, 0)], 0),
        ([Load(5, 0), Load(4, 9)], 1),
        ([Load(4, 3), Load(4, 2), Load(4, 2)], 1),
    ],
)
def test_the_least_tokens_win_then_the_fewest_requests_then_the_first(loads: list[Load], expected: int) -> None:
    assert LeastTokens().choose(loads) == expected


@pytest.mark.parametrize(
    ("healthy", "excluded", "expected"),
    [
        ([True, True], [False, False], [0, 1]),
        ([False, True], [False, False], [1]),
        ([False, True], [False, True], [0]),
        ([False, False], [False, False], [0, 1]),
        ([True, True], [True, True], []),
    ],
)
def test_an_unhealthy_engine_is_better_than_none_and_an_excluded_one_is_not(
    healthy: list[bool], excluded: list[bool], expected: list[int]
) -> None:
    assert eligible(healthy, excluded) == expected
