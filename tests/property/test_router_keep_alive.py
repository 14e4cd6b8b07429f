"""Laws of keep-alives, over any times at which bytes come: a client waits so long and no longer, and not for noise."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_router.core.requests.keep_alive import LOOKS, Silence

KEEP_ALIVE = 60
"""In ticks, and so is everything here."""
LOOK = KEEP_ALIVE // LOOKS


@st.composite
def arrivals(draw: st.DrawFn) -> list[int]:
    """When bytes come, never at the tick of a look: which of the two is first there is the loop's to say."""
    times = draw(st.lists(st.integers(1, 20 * KEEP_ALIVE), max_size=20, unique=True))
    return sorted(time for time in times if time % LOOK)


def comments(times: list[int], blocked: frozenset[int] = frozenset()) -> list[int]:
    """When comments are written. ``blocked``: looks at which none may be."""
    silence = Silence()
    return [
        now
        for number, now in enumerate(range(LOOK, 21 * KEEP_ALIVE, LOOK))
        if silence.is_comment_due(sum(time < now for time in times), may_comment=number not in blocked)
    ]


@given(arrivals())
def test_a_client_gets_something_in_each_keep_alive_and_no_comment_soon_after_a_byte(times: list[int]) -> None:
    said = comments(times)
    heard = sorted([0, *times, *said])
    assert max(after - before for before, after in pairwise(heard)) <= KEEP_ALIVE
    for comment in said:
        last = max(time for time in heard if time < comment)
        assert comment - last >= (LOOK if last in times else KEEP_ALIVE)


@given(arrivals(), st.frozensets(st.integers(0, 45)))
def test_none_is_written_where_it_may_not_be_and_the_next_look_makes_up_for_it(
    times: list[int], blocked: frozenset[int]
) -> None:
    said = comments(times, blocked)
    assert not {now // LOOK - 1 for now in said} & blocked
    for number in blocked:
        last = max([0, *[time for time in (*times, *said) if time < (number + 1) * LOOK]])
        following = (number + 2) * LOOK
        is_silent = not any(last < time < following for time in times)
        if following < 21 * KEEP_ALIVE and number + 1 not in blocked and is_silent and following - last >= KEEP_ALIVE:
            assert following in said
