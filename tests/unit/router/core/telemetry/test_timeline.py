"""The steps of a request: their words, their order, and that they add up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_protocol.kept import KeptRequest, Milestone, Moment
from pdcluster_router.core.telemetry.timeline import HAPPENED, RequestStep, StepKind, timeline_of

SECONDS = st.floats(0, 100)
MAYBE = st.none() | SECONDS


def steps_of(request: KeptRequest) -> list[tuple[float, str]]:
    return [(step.at_s, step.kind.value) for step in timeline_of(request)]


@pytest.mark.parametrize("milestone", Milestone)
def test_each_milestone_has_its_words_and_its_kind(milestone: Milestone) -> None:
    assert milestone.value in HAPPENED
    moment = Moment(0.5, milestone.value, "decode-0", 1)
    assert timeline_of(KeptRequest(request_id="R", total_s=1.0, moments=(moment,)))[0].kind.value == milestone.value


def test_the_time_before_its_arrival_is_below_0() -> None:
    request = KeptRequest(request_id="R", ended_at_unix_s=9.0, total_s=0.5, read_s=2.0, turn_s=0.25, queue_s=0.1)
    assert steps_of(request) == [(-2.25, "read"), (-0.25, "turn"), (0.0, "queue"), (0.5, "end")]


def test_a_request_that_did_not_arrive_has_the_time_in_which_it_was_read() -> None:
    request = KeptRequest(request_id="R", ended_at_unix_s=9.0, read_s=30.0, error="client_too_slow")
    assert steps_of(request) == [(-30.0, "read"), (0.0, "end")]


def test_a_request_of_which_no_time_is_known_has_no_steps() -> None:
    assert timeline_of(KeptRequest(request_id="R", ended_at_unix_s=9.0)) == []


def test_a_failure_has_the_engines_words() -> None:
    moment = Moment(0.5, "prefill_failed", "prefill-1", 2, "it answered 500")
    steps = timeline_of(KeptRequest(request_id="R", total_s=1.0, moments=(moment,)))
    assert steps[0] == RequestStep(0.5, StepKind.FAILURE, "attempt 2: prefill_failed prefill-1: it answered 500")


@settings(max_examples=drawn(300))
@given(SECONDS, MAYBE, MAYBE, MAYBE, st.lists(SECONDS))
def test_steps_add_up_to_the_whole_time(
    total_s: float, read_s: float | None, turn_s: float | None, queue_s: float | None, at_s: list[float]
) -> None:
    moments = tuple(Moment(min(at, total_s), "decode_lost") for at in at_s)
    request = KeptRequest(
        request_id="R", total_s=total_s, read_s=read_s, turn_s=turn_s, queue_s=queue_s, moments=moments
    )
    times = [step.at_s for step in timeline_of(request)]
    assert times == sorted(times)
    before_s = (turn_s or 0.0) + (read_s or 0.0)
    assert sum(after - at for at, after in pairwise([-before_s, *times])) == pytest.approx(before_s + total_s)
