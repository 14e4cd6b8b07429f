"""What the status page gets of a kept request."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_protocol.kept import KeptRequest, LineAhead, Moment, QueueAhead
from pdcluster_router.core.telemetry.recent_requests import MAX_STEPS, MAX_TEXT_CHARS, recent_request

WORD = st.text(max_size=400)


def test_a_request_has_its_steps_without_the_end() -> None:
    request = KeptRequest(
        request_id="R-7",
        client="team-a",
        model="m",
        path="/v1/completions",
        ended_at_unix_s=1000.0,
        read_s=0.25,
        total_s=1.5,
        queue_s=0.5,
        status=200,
        outcome="ok",
        moments=(Moment(0.5, "decode_sent", "decode-0"), Moment(1.25, "first_byte", "decode-0")),
    )
    row = recent_request(request, "served", now_unix_s=1002.52)
    assert msgspec.json.decode(msgspec.json.encode(row)) == {
        "request_id": "R-7",
        "ended_s": 2.5,
        "fate": "served",
        "client": "team-a",
        "model": "m",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "read_s": 0.25,
        "first_byte_s": 1.25,
        "total_s": 1.5,
        "steps": [
            {"kind": "read", "took_s": 0.25, "text": "its head and body come"},
            {"kind": "queue", "took_s": 0.5, "text": "waits to be admitted"},
            {"kind": "decode_sent", "took_s": 0.75, "text": "sent to decode-0"},
            {"kind": "first_byte", "took_s": 0.25, "text": "first byte from decode-0"},
        ],
    }


@pytest.mark.parametrize(
    ("num_requests", "num_known", "num_other_keys", "said"),
    [
        (0, 0, 0, ""),
        (9, 0, 0, ""),
        (5, 5, 0, ", behind 3 of team-b, 2 without a key"),
        (5, 5, 1, ", behind 3 of team-b, 2 without a key, others"),
        (9, 5, 0, ", behind 3 of team-b, 2 without a key, others"),
    ],
)
def test_the_step_in_the_queue_tells_whose_requests_were_let_in_meanwhile(
    num_requests: int, num_known: int, num_other_keys: int, said: str
) -> None:
    ahead = QueueAhead(
        queue="prefill",
        first_turn=7,
        num_requests=num_requests,
        num_known=num_known,
        lines=(LineAhead("team-b", 3, 30), LineAhead("", 2, 20)) if num_known else (),
        num_other_keys=num_other_keys,
    )
    request = KeptRequest(request_id="R", queue_s=1.0, total_s=2.0, ahead=ahead, moments=(Moment(1.0, "decode_sent"),))
    queued, sent = recent_request(request, "served", now_unix_s=0.0).steps
    assert queued.text == f"waits to be admitted{said}"
    assert "behind" not in sent.text


def test_a_clock_that_was_set_back_makes_no_negative_time() -> None:
    request = KeptRequest(request_id="R", ended_at_unix_s=1000.0)
    assert recent_request(request, "served", now_unix_s=900.0).ended_s == 0.0


def test_many_steps_become_one_in_the_middle() -> None:
    moments = tuple(Moment(float(number), f"kind-{number}") for number in range(40))
    row = recent_request(KeptRequest(request_id="R", total_s=40.0, moments=moments), "failed", now_unix_s=0.0)
    assert [step.text for step in row.steps[11:14]] == ["kind-11", "17 more steps", "kind-29"]
    assert [step.took_s for step in row.steps] == [1.0] * 12 + [17.0] + [1.0] * 11


@settings(max_examples=drawn(300))
@given(st.lists(st.tuples(st.floats(0, 100), WORD, WORD, st.integers(0, 9), WORD)), st.floats(0, 100))
def test_whatever_a_request_went_through_its_row_is_bounded_and_adds_up(
    happened: list[tuple[float, str, str, int, str]], read_s: float
) -> None:
    total_s = max((at for at, *_ in happened), default=1.0)
    moments = tuple(Moment(*parts) for parts in happened)
    request = KeptRequest(request_id="R", read_s=read_s, queue_s=0.0, total_s=total_s, moments=moments)
    row = recent_request(request, "failed", now_unix_s=0.0)
    assert len(row.steps) <= MAX_STEPS
    assert all(len(step.text) <= MAX_TEXT_CHARS and step.took_s >= 0 for step in row.steps)
    assert sum(step.took_s for step in row.steps) == pytest.approx(read_s + total_s, abs=1e-4)


@pytest.mark.parametrize("is_served", [True, False])
def test_the_first_byte_of_an_answer_that_was_dropped_is_not_the_requests(is_served: bool) -> None:
    tried = [
        Moment(0.0, "decode_sent", "decode-0"),
        Moment(0.25, "first_byte", "decode-0"),
        Moment(0.25, "decode_error", "decode-0", 0, "it answered 500"),
        Moment(0.25, "decode_sent", "decode-1"),
    ]
    last = Moment(3.0, "first_byte", "decode-1") if is_served else Moment(3.0, "deadline")
    row = recent_request(KeptRequest(request_id="R", total_s=3.5, moments=(*tried, last)), "failed", now_unix_s=0.0)
    assert row.first_byte_s == (3.0 if is_served else None)
    kinds = ["decode_sent", "failure", "failure", "decode_sent", "first_byte" if is_served else "failure"]
    assert [step.kind for step in row.steps] == kinds
