"""Counts of the last minutes: whatever happens when, what is young is counted, and what is old is not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_router.core.telemetry.recent import NUM_STEPS, RecentCounts

SPAN_S = 300.0
STEP_S = SPAN_S / NUM_STEPS
PAUSES = st.one_of(st.floats(0, 5), st.floats(0, 400), st.just(STEP_S), st.just(SPAN_S))


@settings(max_examples=drawn(900))
@given(st.lists(st.tuples(PAUSES, st.sampled_from("abc"))), PAUSES)
def test_counts_are_of_the_span_and_at_most_a_step_less(happened: list[tuple[float, str]], last_pause: float) -> None:
    counts: RecentCounts[str] = RecentCounts(SPAN_S)
    now, times = 1e6, []
    for pause, kind in happened:
        now += pause
        times.append((now, kind))
        counts.add(kind, now=now)
        assert len(counts._steps) <= NUM_STEPS
    now += last_pause
    found = counts.counts(now=now)
    surely = Counter(kind for at, kind in times if at > now - SPAN_S + STEP_S)
    perhaps = Counter(kind for at, kind in times if at > now - SPAN_S)
    assert surely <= found <= perhaps
