"""Numbers of both roles within their bounds: known answers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pdcluster_operator.core.rollout.scaling import UNBOUNDED, Bounds, Pair, exact_ratio

QUARTER_TO_ONE = Bounds(Fraction(1, 4), Fraction(1))


@pytest.mark.parametrize(
    ("bounds", "wish", "fitted"),
    [
        pytest.param(QUARTER_TO_ONE, (2, 4), (2, 4), id="what fits stays"),
        pytest.param(QUARTER_TO_ONE, (1, 8), (2, 8), id="prefill lacks: raised"),
        pytest.param(QUARTER_TO_ONE, (1, 9), (3, 9), id="rounded up, or it would still lack"),
        pytest.param(QUARTER_TO_ONE, (5, 2), (5, 5), id="decode lacks: raised"),
        pytest.param(QUARTER_TO_ONE, (0, 0), (0, 0), id="none of both stays"),
        pytest.param(QUARTER_TO_ONE, (0, 8), (2, 8), id="a role at zero lacks"),
        pytest.param(QUARTER_TO_ONE, (3, 0), (3, 3), id="the other one too"),
        pytest.param(Bounds(), (1, 99), (1, 99), id="no ratio: anything fits"),
        pytest.param(Bounds(), (0, 99), (1, 99), id="no ratio: but not one role alone"),
        pytest.param(Bounds(most=Pair(2, 3)), (9, 9), (2, 3), id="own maxima"),
        pytest.param(
            Bounds(Fraction(1, 4), Fraction(1), most=Pair(1, 9)), (1, 8), (1, 4), id="lowered where the maximum forbids"
        ),
        pytest.param(
            Bounds(Fraction(1, 4), Fraction(1), most=Pair(9, 3)), (5, 2), (3, 3), id="decode's maximum lowers prefill"
        ),
        pytest.param(
            Bounds(Fraction(3, 2), Fraction(3, 2)), (1, 1), (3, 2), id="one ratio only: both raised until it is met"
        ),
        pytest.param(
            Bounds(Fraction(3, 2), Fraction(3, 2), most=Pair(5, 9)), (5, 3), (3, 2), id="one ratio only: both lowered"
        ),
    ],
)
def test_known_answers(bounds: Bounds, wish: tuple[int, int], fitted: tuple[int, int]) -> None:
    assert bounds.fit(Pair(*wish)) == Pair(*fitted)


def test_a_tenth_is_a_tenth() -> None:
    """The float 0.1 is a little more, and 10 decode would need 2 prefill."""
    assert Bounds(min_ratio=exact_ratio(0.1)).fit(Pair(1, 10)) == Pair(1, 10)
    assert exact_ratio(1e-05) == Fraction(1, 100_000)


@pytest.mark.parametrize(
    ("min_ratio", "max_ratio", "most", "message"),
    [
        pytest.param(2, 1, (9, 9), "1 to 9 prefill and 1 to 9 decode instances have a ratio of 2 to 1", id="crossed"),
        pytest.param(5, None, (4, 9), "1 to 4 prefill and 1 to 9 decode", id="too few prefill allowed"),
        pytest.param(None, None, (0, 9), "no 1 to 0 prefill", id="none allowed"),
        pytest.param(Fraction(3, 2), Fraction(3, 2), (2, 9), "ratio of 3/2 to 3/2", id="no whole numbers"),
        pytest.param(0, None, (9, 9), "a ratio must be above 0", id="zero ratio"),
    ],
)
def test_bounds_that_nothing_fits_are_refused(
    min_ratio: Fraction | None,
    max_ratio: Fraction | None,
    most: tuple[int, int],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        Bounds(
            None if min_ratio is None else Fraction(min_ratio),
            None if max_ratio is None else Fraction(max_ratio),
            Pair(*most),
        )


def test_bounds_that_only_huge_numbers_could_fit_are_refused_and_not_searched_for_ever() -> None:
    with pytest.raises(ValueError, match="widen the ratio"):
        Bounds(Fraction(UNBOUNDED + 1, UNBOUNDED), Fraction(UNBOUNDED + 1, UNBOUNDED))
