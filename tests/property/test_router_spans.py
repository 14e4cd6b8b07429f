"""Laws of spans: a tree of one root, children within their parents, steps that do not overlap and that add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_protocol.kept import KeptRequest, Milestone, Moment
from pdcluster_router.core.telemetry.request_trace import SpanIds
from pdcluster_router.core.telemetry.spans import TraceSpan, spans_of
from pdcluster_router.telemetry.failures import FailureKind

SECONDS = st.floats(0, 1000)
MAYBE = st.none() | SECONDS
WHATS = st.sampled_from([one.value for one in Milestone] + [one.value for one in FailureKind])
MOMENTS = st.lists(
    st.builds(Moment, SECONDS, WHATS, st.sampled_from(["", "decode-0", "prefill-1"]), st.integers(0, 3)), max_size=64
)
REQUESTS = st.builds(
    KeptRequest,
    request_id=st.just("R"),
    path=st.just("/v1/completions"),
    total_s=MAYBE,
    read_s=MAYBE,
    turn_s=MAYBE,
    queue_s=MAYBE,
    status=st.none() | st.integers(200, 599),
    outcome=st.sampled_from(["", "ok", "lost", "engine_error", "client_gone"]),
    error=st.sampled_from(["", "engine_error", "decode_lost"]),
    moments=MOMENTS.map(lambda moments: tuple(sorted(moments, key=lambda one: one.at_s))),
)
IDS = st.builds(
    SpanIds,
    trace_id=st.just("0af7651916cd43dd8448eb211c80319c"),
    span_id=st.integers(1, (1 << 64) - 1),
    parent_id=st.integers(0, (1 << 64) - 1),
    is_part=st.booleans(),
)


@pytest.mark.parametrize("span_id", [1, (1 << 64) - 2, (1 << 64) - 1])
def test_ids_never_meet_wherever_they_begin(span_id: int) -> None:
    ids = SpanIds("0af7651916cd43dd8448eb211c80319c", span_id)
    found = [span_id, *map(ids.call, range(1, 100)), *map(ids.step, range(100))]
    assert len({*found}) == len(found)
    assert all(0 < one < 1 << 64 for one in found)


@settings(max_examples=drawn(500))
@given(REQUESTS, IDS, st.integers(0, 3))
def test_spans_are_a_tree_and_children_lie_within_their_parents(
    request: KeptRequest, ids: SpanIds, num_parts: int
) -> None:
    spans = spans_of(request, ids, scheme="http", num_parts=num_parts)
    own, *others = spans
    assert (own.span_id, own.parent_id) == (ids.span_id, ids.parent_id)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert all(0 < span.span_id < 1 << 64 for span in spans)
    for span in others:
        parent = by_id[span.parent_id]
        assert parent.begin_s <= span.begin_s <= span.end_s <= parent.end_s
    assert all(own.begin_s <= event.at_s <= own.end_s for event in own.events)


@settings(max_examples=drawn(500))
@given(REQUESTS, IDS)
def test_steps_of_one_call_do_not_overlap(request: KeptRequest, ids: SpanIds) -> None:
    steps: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in spans_of(request, ids, scheme="http"):
        steps[span.parent_id].append(span)
    del steps[ids.parent_id]
    for parent_id, children in steps.items():
        if parent_id != ids.span_id:
            assert all(one.end_s <= other.begin_s for one, other in pairwise(children))


@settings(max_examples=drawn(500))
@given(REQUESTS, IDS)
def test_there_is_a_span_for_each_call_to_an_engine_with_the_id_that_the_engine_was_told(
    request: KeptRequest, ids: SpanIds
) -> None:
    sent = [one for one in request.moments if one.what in ("decode_sent", "prefill_sent")]
    calls = [span for span in spans_of(request, ids, scheme="http") if span.name in ("decode", "prefill")]
    assert [span.span_id for span in calls] == [ids.call(number) for number in range(1, len(sent) + 1)]
    assert [span.attributes["pdcluster.engine"] for span in calls] == [one.engine for one in sent]


def gaps_of(spans: Sequence[TraceSpan]) -> list[float]:
    return [
        after.begin_s - before.end_s
        for before, after in pairwise(sorted(spans, key=lambda one: (one.begin_s, one.end_s)))
    ]


@settings(max_examples=drawn(300))
@given(st.lists(SECONDS, min_size=7, max_size=7), SECONDS, SECONDS)
def test_the_steps_of_a_good_request_add_up_to_its_time(at_s: list[float], read_s: float, turn_s: float) -> None:
    """All but the router's own two steps: from the queue to decode, and from the reservation to prefill."""
    queue_s, sent, reserved, ordered, replied, first, total = sorted(at_s)
    moments = (
        Moment(sent, "decode_sent", "decode-0"),
        Moment(reserved, "reserved", "decode-0"),
        Moment(ordered, "prefill_sent", "prefill-0", 1),
        Moment(replied, "prefill_replied", "prefill-0", 1),
        Moment(first, "first_byte", "decode-0"),
    )
    request = KeptRequest(
        request_id="R", total_s=total, read_s=read_s, turn_s=turn_s, queue_s=queue_s, outcome="ok", moments=moments
    )
    own, *others = spans_of(request, SpanIds("0" * 31 + "1", 7), scheme="http")
    steps = [span for span in others if span.name != "decode"]
    told_s = sum(span.end_s - span.begin_s for span in steps)
    between_s = (sent - queue_s) + (ordered - reserved)
    assert abs(told_s + between_s - (own.end_s - own.begin_s)) < 1e-6
    assert min(gaps_of(steps)) >= 0
