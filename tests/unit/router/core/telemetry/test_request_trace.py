"""The ids of a request's spans, and what engines are told of the trace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_router.core.apis.trace_context import TRACE_HEADER, parent_in
from pdcluster_router.core.telemetry.request_trace import (
    NUM_FRESH_BYTES,
    SpanIds,
    begun,
    continued,
    is_chosen,
    unrecorded_line,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
FRESH = bytes(range(1, NUM_FRESH_BYTES + 1))
IDS = st.integers(1, (1 << 64) - 1)


def told_by(line: bytes) -> tuple[str, str, int]:
    """What the next hop reads in the line."""
    name, _, value = line.removesuffix(b"\r\n").partition(b": ")
    assert name == TRACE_HEADER
    parent = parent_in([(name, value)], {name: value})
    assert parent is not None
    return parent.trace_id, parent.span_id, parent.flags


def test_each_call_has_a_parent_of_its_own_in_the_callers_trace() -> None:
    trace = continued(TRACE_ID, CALLER, 1, FRESH)
    first, second = told_by(trace.next_line()), told_by(trace.next_line())
    assert first == (TRACE_ID, f"{trace.ids.call(1):016x}", 1)
    assert second == (TRACE_ID, f"{trace.ids.call(2):016x}", 1)
    assert f"{trace.ids.parent_id:016x}" == CALLER


def test_unknown_flags_go_no_further_and_a_random_id_stays_known_as_such() -> None:
    assert told_by(continued(TRACE_ID, CALLER, 0xFF, FRESH).next_line())[2] == 3


def test_a_new_trace_has_no_parent_and_is_told_as_recorded() -> None:
    trace = begun(FRESH)
    assert trace.ids.parent_id == 0
    assert told_by(trace.next_line())[2] & 1


def test_engines_are_told_that_a_trace_is_not_recorded() -> None:
    trace_id, span_id, flags = told_by(unrecorded_line(FRESH))
    assert (trace_id, flags & 1) == (FRESH[:16].hex(), 0)
    assert int(span_id, 16)


def test_a_part_is_a_child_of_its_whole() -> None:
    whole = continued(TRACE_ID, CALLER, 1, FRESH)
    part = whole.part(0)
    assert (part.ids.trace_id, part.ids.parent_id, part.ids.is_part) == (TRACE_ID, whole.ids.span_id, True)
    assert part.ids.span_id != whole.ids.span_id


@given(IDS)
def test_no_two_spans_of_a_request_share_an_id_and_none_is_0(span_id: int) -> None:
    whole = SpanIds(TRACE_ID, span_id)
    trace = continued(TRACE_ID, CALLER, 1, FRESH[:16] + span_id.to_bytes(8))
    parts = [trace.part(number).ids for number in range(3)]
    ids = [one.span_id for one in (whole, *parts)]
    ids += [one.call(number) for one in (whole, *parts) for number in range(1, 200)]
    ids += [one.step(number) for one in (whole, *parts) for number in range(200)]
    assert len(set(ids)) >= len(ids) - 1  # An id of zeros becomes 1, which another one may be.
    assert all(0 < one < 1 << 64 for one in ids)


@given(st.binary(min_size=NUM_FRESH_BYTES, max_size=NUM_FRESH_BYTES))
def test_all_are_chosen_at_1_and_none_at_0(fresh: bytes) -> None:
    assert is_chosen(fresh, 1.0)
    assert not is_chosen(fresh, 0.0)


def test_of_evenly_spread_ids_the_ratio_is_chosen() -> None:
    spread = [bytes(8) + bytes([number]) + bytes(15) for number in range(256)]
    assert sum(is_chosen(fresh, 0.25) for fresh in spread) == 64
