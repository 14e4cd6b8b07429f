"""How long a request waited in prefill's queue, and how long it was computed."""

from __future__ import annotations

from pdcluster_connector.scheduler.prefill_times import PrefillTimes
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.prefill_answer import NOTHING_SAID, PrefillAnswer

R, OTHER = RequestId("r"), RequestId("other")


def test_the_queue_ends_with_the_first_step_and_the_compute_with_the_request() -> None:
    times = PrefillTimes()
    times.add(R, now=10.0)
    times.begin(R, now=12.5)
    times.begin(R, now=13.0)  # It was preempted, and is computed anew.
    assert times.finish(R, now=13.75) == PrefillAnswer("", 2.5, 1.25)


def test_a_request_that_no_step_has_computed_has_no_times() -> None:
    times = PrefillTimes()
    times.add(R, now=10.0)
    assert times.finish(R, now=11.0) == NOTHING_SAID


def test_requests_that_are_not_pushed_have_none_and_leave_nothing() -> None:
    times = PrefillTimes()
    times.begin(OTHER, now=1.0)
    assert times.finish(OTHER, now=2.0) == NOTHING_SAID
    times.add(R, now=1.0)
    times.begin(R, now=1.0)
    times.finish(R, now=2.0)
    assert times.finish(R, now=3.0) == NOTHING_SAID
