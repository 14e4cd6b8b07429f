"""Laws of outages: no request is lost before its time, and none is kept after it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_router.core.engines.outage import Outage, Sign

MOST_S = 3
Probe = tuple[Sign, int]
"""What it says, and seconds since the one before, whole: so that sums are exact."""
PROBES = st.lists(st.tuples(st.sampled_from([*Sign, Sign.DEAD, Sign.SILENT]), st.integers(1, 9)), max_size=40)


def told(probes: list[Probe], kind: type[Outage] = Outage) -> tuple[Outage, int]:
    """What the engine's outage is after these, and the time of the last one."""
    outage, now = kind(), 0
    for sign, seconds in probes:
        now += seconds
        outage.saw(sign, now=float(now), most_s=float(MOST_S))
    return outage, now


def failing_s(probes: list[Probe], signs: set[Sign]) -> int | None:
    """Seconds that were watched from the first to the last of the newest probes, all of ``signs``. None: no such one.

    Counted backwards from the whole history, as nobody would who must not keep it.
    """
    num_failing = next((index for index, (sign, _) in enumerate(reversed(probes)) if sign not in signs), len(probes))
    if not num_failing:
        return None
    return sum(min(seconds, MOST_S) for _, seconds in probes[len(probes) - num_failing + 1 :])


def check_lost_when_its_time_is_over(probes: list[Probe], gone_s: int, more_s: int, kind: type[Outage]) -> None:
    outage, _ = told(probes, kind)
    dead_s, bad_s = failing_s(probes, {Sign.DEAD}), failing_s(probes, {Sign.DEAD, Sign.SILENT})
    silent_s = gone_s + more_s
    is_lost = (dead_s is not None and dead_s >= gone_s) or (bad_s is not None and bad_s >= silent_s)
    assert bool(outage.why_lost(0.0, gone_s=float(gone_s), silent_s=float(silent_s))) is is_lost


@given(PROBES, st.integers(1, 60), st.integers(0, 60))
@settings(max_examples=drawn(600))
def test_a_request_is_lost_exactly_when_its_engines_time_is_over(probes: list[Probe], gone_s: int, more_s: int) -> None:
    check_lost_when_its_time_is_over(probes, gone_s, more_s, Outage)


@given(PROBES, st.integers(1, 60), st.integers(0, 200), st.integers(0, 200))
@settings(max_examples=drawn(300))
def test_what_was_heard_later_is_lost_no_earlier(probes: list[Probe], gone_s: int, early: int, late: int) -> None:
    outage, now = told(probes)
    first, second = sorted((float(early), float(late)))
    is_lost = [
        bool(outage.why_lost(since, gone_s=float(gone_s), silent_s=float(2 * gone_s))) for since in (first, second)
    ]
    assert is_lost[0] or not is_lost[1]
    assert not outage.why_lost(float(now - gone_s + 1), gone_s=float(gone_s), silent_s=float(2 * gone_s))


class CountsTheUnseen(Outage):
    """A bug: the time in which the router stood still counts."""

    __slots__ = ()

    def saw(self, sign: Sign, *, now: float, most_s: float) -> None:
        super().saw(sign, now=now, most_s=1e9)


class ForgetsNothing(Outage):
    """A bug: a good probe does not end an outage."""

    __slots__ = ()

    def saw(self, sign: Sign, *, now: float, most_s: float) -> None:
        if sign is not Sign.WELL:
            super().saw(sign, now=now, most_s=most_s)


@pytest.mark.parametrize(
    ("kind", "probes"),
    [
        (CountsTheUnseen, [(Sign.DEAD, 1), (Sign.DEAD, 9)]),
        (ForgetsNothing, [(Sign.DEAD, 1), (Sign.DEAD, 3), (Sign.DEAD, 3), (Sign.WELL, 1)]),
    ],
)
def test_the_law_finds_bugs_that_are_put_in(kind: type[Outage], probes: list[Probe]) -> None:
    check_lost_when_its_time_is_over(probes, 5, 60, Outage)
    with pytest.raises(AssertionError):
        check_lost_when_its_time_is_over(probes, 5, 60, kind)
