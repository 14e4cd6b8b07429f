"""A lane looks at its writes seldom, and is never late for their end."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_connector.core.pace import LONGEST_LOOK_S, SHORTEST_LOOK_S, WritePace

WRITE_S = st.floats(1e-6, 1.0)
NUM_WRITES = st.integers(1, 1024)


def looks_until_over(pace: WritePace, write_s: float, num_writes: int) -> tuple[int, float]:
    """How often a lane looks at writes that end one after the other, and how late it sees the last one end."""
    now, num_ended, num_looks = 0.0, 0, 0
    pace.began(now=now)
    while num_ended < num_writes:
        now += pace.next_look_s(num_writes - num_ended)
        ended = min(num_writes, math.floor(now / write_s))
        pace.looked(ended - num_ended, now=now)
        num_ended, num_looks = ended, num_looks + 1
    return num_looks, now - num_writes * write_s


@given(WRITE_S, NUM_WRITES)
def test_the_last_write_is_seen_soon(write_s: float, num_writes: int) -> None:
    _, late_s = looks_until_over(WritePace(), write_s, num_writes)
    assert late_s <= LONGEST_LOOK_S


@given(WRITE_S, NUM_WRITES)
def test_a_lane_that_knows_the_pace_sees_the_last_write_within_a_millisecond_or_a_write(
    write_s: float, num_writes: int
) -> None:
    _, late_s = looks_until_over(WritePace(write_s), write_s, num_writes)
    assert late_s <= max(SHORTEST_LOOK_S, write_s) + 1e-9


@given(st.floats(1e-4, 8e-3), NUM_WRITES)
def test_looks_grow_with_the_time_not_with_the_writes(write_s: float, num_writes: int) -> None:
    num_looks, _ = looks_until_over(WritePace(write_s), write_s, num_writes)
    in_the_middle = num_writes * write_s / LONGEST_LOOK_S
    at_the_end = 2 * LONGEST_LOOK_S / SHORTEST_LOOK_S + math.log2(num_writes) + 2
    assert num_looks <= in_the_middle + at_the_end


@given(st.lists(st.tuples(st.integers(0, 1024), st.floats(0, 100)), max_size=20), st.integers(0, 1 << 20))
def test_every_look_is_within_the_bounds(history: list[tuple[int, float]], num_in_flight: int) -> None:
    pace, now = WritePace(), 0.0
    pace.began(now=now)
    for num_ended, seconds in history:
        now += seconds
        pace.looked(num_ended, now=now)
    assert SHORTEST_LOOK_S <= pace.next_look_s(num_in_flight) <= LONGEST_LOOK_S


def test_time_without_anything_in_flight_says_nothing_about_the_link() -> None:
    pace = WritePace()
    pace.began(now=100.0)
    pace.looked(10, now=100.0002)
    assert abs(pace.write_s - 0.00002) < 1e-9


def test_a_large_write_that_is_half_done_slows_nothing_down() -> None:
    pace = WritePace(write_s=0.001)
    pace.began(now=0.0)
    pace.looked(0, now=5.0)
    assert pace.next_look_s(4) == 0.002
