"""The spans of a push or a receive: what they say, and what holds for any trace line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_connector.core.transfer_spans import MAX_PARTS, TransferSpan, sampled_parent, span_of
from pdcluster_protocol.ids import RequestId, TransferId
from pdcluster_protocol.trace import LayerTrace, PushTrace, ReceiveTrace

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


def push(
    *layers: LayerTrace,
    outcome: str = "done",
    begin: float | None = 1.0,
    num_bytes: int = 0,
    ended_at: float | None = None,
) -> PushTrace:
    return PushTrace(
        transfer_id=TransferId("t"),
        request_id=RequestId("r"),
        decode_rank=3,
        outcome=outcome,
        reason="10.0.0.1 said: the prompt",
        prompt_tokens=100,
        num_layers=2,
        num_bytes=num_bytes,
        ranges=2,
        writes=2,
        forward_begin=begin,
        forward_end=2.0,
        ended_at=ended_at,
        layers=layers,
    )


def receive(outcome: str, begin: float | None = 1.0, end: float | None = 2.0) -> ReceiveTrace:
    return ReceiveTrace(
        transfer_id=TransferId("t"), outcome=outcome, reason="10.0.0.1", expected_at=begin, ended_at=end
    )


def test_a_push_has_a_span_for_each_layer_from_its_save_to_its_acknowledgement() -> None:
    span = span_of(push(LayerTrace(7, 0, 1.1, 1.2, 1.4, 8), LayerTrace(7, 1, 1.3, 1.4, 1.9, 16), num_bytes=24))
    assert span is not None
    assert (span.name, span.begin, span.end, span.error) == ("kv_push", 1.0, 1.9, "")
    assert span.attributes["pdcluster.bytes"] == 24
    assert span.attributes["pdcluster.decode_rank"] == 3
    assert [(one.name, one.begin, one.write_begin, one.end) for one in span.parts] == [
        ("kv_layer", 1.1, 1.2, 1.4),
        ("kv_layer", 1.3, 1.4, 1.9),
    ]
    assert [dict(one.attributes) for one in span.parts] == [
        {"pdcluster.step": 7, "pdcluster.layer": 0, "pdcluster.bytes": 8},
        {"pdcluster.step": 7, "pdcluster.layer": 1, "pdcluster.bytes": 16},
    ]


def test_a_push_that_waits_in_vain_lasts_until_it_has_failed_and_has_no_layer_that_was_not_written() -> None:
    span = span_of(push(LayerTrace(7, 0, 1.1, 0.0, 0.0, 8), outcome="failed", ended_at=61.0))
    assert span is not None
    assert (span.begin, span.end, span.error, span.parts) == (1.0, 61.0, "push_failed", ())


def test_a_layer_that_decode_has_not_acknowledged_is_no_good_one() -> None:
    span = span_of(
        push(LayerTrace(7, 0, 1.1, 1.2, 1.3, 8), LayerTrace(7, 1, 1.2, 1.3, 0.0, 8), outcome="failed", ended_at=3.0)
    )
    assert span is not None
    assert [(layer.error, layer.end) for layer in span.parts] == [("", 1.3), ("unacknowledged", 3.0)]


@pytest.mark.parametrize(("number", "name"), [(MAX_PARTS, "kv_layer"), (MAX_PARTS + 1, "kv_step")])
def test_a_push_has_as_many_layers_as_a_collector_takes(number: int, name: str) -> None:
    span = span_of(push(*(LayerTrace(1, layer, 1.1, 1.2, 1.3, 2) for layer in range(number))))
    assert span is not None
    assert {one.name for one in span.parts} == {name}


def test_a_push_of_very_many_layers_has_a_span_for_each_step() -> None:
    layers = [LayerTrace(step, layer, step + 0.1, step + 0.2, step + 0.3, 2) for step in (1, 2) for layer in range(200)]
    span = span_of(push(*layers))
    assert span is not None
    assert [(one.name, one.begin, one.write_begin, one.end) for one in span.parts] == [
        ("kv_step", 1.1, 1.2, 1.3),
        ("kv_step", 2.1, 2.2, 2.3),
    ]
    assert [one.attributes["pdcluster.layers"] for one in span.parts] == [200, 200]
    assert [one.attributes["pdcluster.bytes"] for one in span.parts] == [400, 400]


@pytest.mark.parametrize("outcome", ["done", "unneeded"])
def test_a_push_that_was_not_needed_has_ended_well(outcome: str) -> None:
    span = span_of(push(outcome=outcome))
    assert span is not None
    assert (span.error, span.attributes["pdcluster.outcome"]) == ("", outcome)


def test_a_push_of_which_nothing_had_begun_has_no_span() -> None:
    assert span_of(push(begin=None)) is None


@pytest.mark.parametrize(("outcome", "error"), [("received", ""), ("failed", "receive_failed")])
def test_a_receive_lasts_from_the_reservation_to_its_end(outcome: str, error: str) -> None:
    assert span_of(receive(outcome)) == TransferSpan(
        "kv_receive", 1.0, 2.0, {"pdcluster.transfer_id": "t", "pdcluster.outcome": outcome}, error
    )


@pytest.mark.parametrize("line", [receive("failed", begin=None), receive("failed", end=None)])
def test_a_receive_that_never_began_has_no_span(line: ReceiveTrace) -> None:
    assert span_of(line) is None


@pytest.mark.parametrize(
    ("given_header", "is_traced"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"cc-{TRACE}-{SPAN}-01more", False),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}-1", False),
        ("", False),
    ],
)
def test_only_what_the_caller_records_is_traced(given_header: str, is_traced: bool) -> None:
    assert sampled_parent({"traceparent": given_header}) == (given_header if is_traced else "")


def test_a_request_without_headers_is_not_traced() -> None:
    assert sampled_parent(None) == sampled_parent({}) == ""
    assert sampled_parent(cast("Any", {"traceparent": None})) == ""


def test_nothing_is_kept_of_what_a_later_version_adds() -> None:
    parent = f"cc-{TRACE}-{SPAN}-01"
    assert sampled_parent({"traceparent": f"{parent}-{'x' * 1_000_000}"}) == parent


moments = st.one_of(st.just(0.0), st.floats(0.001, 1000))
layer_traces = st.builds(
    LayerTrace, st.integers(0, 5), st.integers(0, 99), st.floats(0.001, 1000), moments, moments, st.integers(0, 99)
)


@given(
    st.lists(layer_traces, max_size=2 * MAX_PARTS),
    st.sampled_from(["done", "failed", "unneeded"]),
    st.none() | st.floats(0.001, 1000),
    st.none() | st.floats(0.001, 1000),
)
def test_spans_lie_within_their_parents_and_lose_no_byte(
    layers: list[LayerTrace], outcome: str, begin: float | None, ended_at: float | None
) -> None:
    span = span_of(push(*layers, outcome=outcome, begin=begin, ended_at=ended_at))
    if span is None:
        assert not layers
        assert begin is ended_at is None
        return
    assert len(span.parts) <= MAX_PARTS
    written = sum(one.num_bytes for one in layers if one.write_begin)
    assert sum(int(one.attributes["pdcluster.bytes"]) for one in span.parts) == written
    for inner, outer in _pairs(span):
        assert outer.begin <= inner.begin <= inner.end <= outer.end
        assert inner.write_begin is None or inner.write_begin <= inner.end
        assert "10.0.0.1" not in str(inner.attributes) + str(outer.attributes), "no reason goes to a collector"


def _pairs(span: TransferSpan) -> Iterator[tuple[TransferSpan, TransferSpan]]:
    yield span, span
    for part in span.parts:
        yield part, span
