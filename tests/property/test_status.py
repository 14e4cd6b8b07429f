"""Laws of the status reducer, over any facts in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_operator.core.status.conditions import Counts, Reason, Status, Truth, Type
from pdcluster_operator.core.status.explain import explain
from pdcluster_operator.core.status.pool_status import Facts, Verification, deadline_at, reduce_status
from pdcluster_operator.core.status.status_events import events_between


@st.composite
def counts(draw: st.DrawFn, *, is_stopped: bool) -> Counts:
    wanted = 0 if is_stopped else draw(st.integers(1, 4))
    replicas = draw(st.integers(0, 5))
    updated = draw(st.integers(0, replicas))
    updated_ready = draw(st.integers(0, updated))
    ready = draw(st.integers(updated_ready, updated_ready + replicas - updated))
    return Counts(wanted, draw(st.integers(0, wanted)), replicas, updated, ready, updated_ready)


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    is_stopped = draw(st.booleans())
    return Facts(
        generation=draw(st.integers(1, 3)),
        target=draw(st.sampled_from("AB")),
        prefill=draw(counts(is_stopped=is_stopped)),
        decode=draw(counts(is_stopped=is_stopped)),
        routers_wanted=draw(st.integers(0, 2)),
        routers_ready=draw(st.integers(0, 2)),
        deadline_s=draw(st.sampled_from([60, 600])),
        refusal=draw(st.sampled_from(["", "", "block sizes differ"])),
        verification=draw(st.sampled_from(Verification)),
        verification_error="timeout",
        is_paused=draw(st.booleans()),
        is_target_empty=draw(st.booleans()),
    )


HISTORIES = st.lists(st.tuples(facts(), st.integers(0, 400)), min_size=1, max_size=6)


def last_two(history: list[tuple[Facts, int]]) -> tuple[Status | None, Status, Facts, int]:
    """The status before the last reduction and after it, its facts and its time."""
    before: Status | None = None
    status, now = reduce_status(history[0][0], None, now=0), 0
    for found, passed in history[1:]:
        now += passed
        before, status = status, reduce_status(found, status, now=now)
    return before, status, history[-1][0], now


@given(HISTORIES)
def test_reducing_twice_changes_nothing_and_sends_nothing(history: list[tuple[Facts, int]]) -> None:
    _, status, found, now = last_two(history)
    again = reduce_status(found, status, now=now)
    assert again == status
    assert events_between(status, again) == ()


@given(HISTORIES, st.integers(0, 10_000))
def test_time_alone_changes_nothing_but_a_missed_deadline(history: list[tuple[Facts, int]], passed: int) -> None:
    _, status, found, now = last_two(history)
    deadline = deadline_at(status, found.deadline_s)
    later = reduce_status(found, status, now=now + passed)
    is_missed = deadline is not None and now + passed >= deadline
    assert (later == status) is not is_missed
    assert not is_missed or later.reason(Type.PROGRESSING) is Reason.PROGRESS_DEADLINE_EXCEEDED


@given(HISTORIES)
def test_a_condition_has_a_new_time_exactly_when_its_truth_has_changed(history: list[tuple[Facts, int]]) -> None:
    before, status, _, now = last_two(history)
    for found in status.conditions:
        was = before.condition(found.type) if before else None
        is_same = was is not None and was.truth is found.truth
        assert found.transition_s == (was.transition_s if was and is_same else now)


@given(HISTORIES)
def test_every_condition_is_written_once_and_ready_needs_the_others(history: list[tuple[Facts, int]]) -> None:
    _, status, found, _ = last_two(history)
    assert [one.type for one in status.conditions] == list(Type)
    truths = {one.type: one.truth is Truth.TRUE for one in status.conditions}
    needed = [Type.ACCEPTED, Type.PREFILL_READY, Type.DECODE_READY, Type.ROUTER_READY, Type.TRANSFER_VERIFIED]
    assert truths[Type.READY] == all(truths[one] for one in needed)
    assert not truths[Type.READY] or status.verified == found.target


@given(HISTORIES)
def test_whatever_keeps_it_from_being_ready_can_be_explained(history: list[tuple[Facts, int]]) -> None:
    _, status, _, _ = last_two(history)
    sentences = explain(status, status.observed_generation)
    is_ready = status.reason(Type.READY) is Reason.SERVING
    assert sentences
    assert is_ready or not sentences[0].startswith("Ready:")
