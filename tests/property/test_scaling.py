"""Laws of fitting two autoscalers' wishes into the bounds."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_operator.core.rollout.scaling import Bounds, Pair

COUNTS = st.integers(0, 30)
RATIOS = st.none() | st.fractions(Fraction(1, 8), Fraction(8), max_denominator=8)


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    """Any that something fits: made around a pair that does."""
    fits = Pair(draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    ratio = Fraction(fits.prefill, fits.decode)
    below, above = draw(RATIOS), draw(RATIOS)
    most = Pair(draw(st.integers(fits.prefill, 20)), draw(st.integers(fits.decode, 20)))
    return Bounds(below and min(below, ratio), above and max(above, ratio), most)


WISHES = st.builds(Pair, COUNTS, COUNTS)


def fitting(limits: Bounds) -> list[Pair]:
    """All pairs that fit, by trying them."""
    return [
        Pair(prefill, decode)
        for prefill in range(1, limits.most.prefill + 1)
        for decode in range(1, limits.most.decode + 1)
        if (limits.min_ratio or 0) <= Fraction(prefill, decode) <= (limits.max_ratio or 99)
    ]


@given(bounds(), WISHES)
def test_what_comes_out_fits_all_bounds(limits: Bounds, wish: Pair) -> None:
    assert limits.fit(wish) in ([Pair(0, 0)] if wish == Pair(0, 0) else fitting(limits))


@given(bounds(), WISHES)
def test_what_comes_out_comes_out_again_so_nothing_is_ever_fought(limits: Bounds, wish: Pair) -> None:
    fitted = limits.fit(wish)
    assert limits.fit(fitted) == fitted
    assert limits.allows(fitted)


@given(bounds(), WISHES)
def test_a_wish_that_fits_is_granted(limits: Bounds, wish: Pair) -> None:
    assert wish not in fitting(limits) or limits.fit(wish) == wish


@given(bounds(), WISHES)
def test_nothing_is_lowered_below_a_wish_that_more_of_the_other_role_could_grant(limits: Bounds, wish: Pair) -> None:
    fitted, possible = limits.fit(wish), fitting(limits)
    above = [pair for pair in possible if pair.prefill >= wish.prefill and pair.decode >= wish.decode]
    if above and wish != Pair(0, 0):
        assert fitted == Pair(min(pair.prefill for pair in above), min(pair.decode for pair in above))


@given(bounds(), WISHES, st.sampled_from([(1, 0), (0, 1)]))
def test_a_larger_wish_never_gives_less(limits: Bounds, wish: Pair, more: tuple[int, int]) -> None:
    was, now = limits.fit(wish), limits.fit(Pair(wish.prefill + more[0], wish.decode + more[1]))
    assert now.prefill >= was.prefill
    assert now.decode >= was.decode
