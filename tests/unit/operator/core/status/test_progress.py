"""What counts as progress, when a rollout is late, and when it is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from operator_cases.statuses import ALL_READY, HALF_WAY, NEXT, WELL, WELL_STATUS
from pdcluster_operator.core.status.conditions import Counts, Reason, Status, Truth, Type
from pdcluster_operator.core.status.pool_status import Facts, Problems, Verification, deadline_at, reduce_status


def progressing(status: Status) -> tuple[Reason, int | None]:
    found = status.condition(Type.PROGRESSING)
    assert found is not None
    return found.reason, found.update_s


def test_a_rollout_without_progress_misses_its_deadline_and_progress_brings_it_back() -> None:
    status = reduce_status(NEXT, WELL_STATUS, now=2000)
    assert progressing(status) == (Reason.ROLLING_OUT, 2000)
    assert deadline_at(status, 600) == 2600
    status = reduce_status(NEXT, status, now=2599)
    assert progressing(status) == (Reason.ROLLING_OUT, 2000)
    status = reduce_status(NEXT, status, now=2600)
    assert progressing(status) == (Reason.PROGRESS_DEADLINE_EXCEEDED, 2000)
    assert deadline_at(status, 600) is None
    better = replace(NEXT, prefill=replace(HALF_WAY, ready=3, updated_ready=1))
    assert progressing(reduce_status(better, status, now=9000)) == (Reason.ROLLING_OUT, 9000)


@pytest.mark.parametrize(
    "better",
    [
        pytest.param(replace(NEXT, decode=replace(HALF_WAY, replicas=4, updated=2)), id="one more of the target"),
        pytest.param(replace(NEXT, decode=replace(HALF_WAY, replicas=2)), id="one old one less"),
        pytest.param(replace(NEXT, decode=replace(HALF_WAY, ready=3)), id="one more ready"),
        pytest.param(replace(NEXT, decode=replace(HALF_WAY, updated_ready=1)), id="a ready one of the target"),
        pytest.param(replace(NEXT, verification=Verification.PASSED), id="verified"),
        pytest.param(replace(NEXT, target="another"), id="another target"),
    ],
)
def test_what_counts_as_progress(better: Facts) -> None:
    status = reduce_status(NEXT, WELL_STATUS, now=2000)
    assert progressing(reduce_status(better, status, now=2500))[1] == 2500


def told(status: Status) -> dict[Type, Truth]:
    return {condition.type: condition.truth for condition in status.conditions}


def test_while_nothing_can_be_carried_out_status_tells_of_losses_and_of_nothing_that_got_better() -> None:
    lost = replace(NEXT, prefill=replace(ALL_READY, ready=0, updated_ready=0))
    worse = WELL_STATUS.with_losses_of(reduce_status(lost, WELL_STATUS, now=2000))
    assert {one for one, truth in told(worse).items() if truth is not told(WELL_STATUS)[one]} == {
        Type.PREFILL_READY,
        Type.DECODE_READY,
        Type.READY,
        Type.DEGRADED,
    }
    assert (worse.target, worse.verified, worse.prefill) == (
        WELL_STATUS.target,
        WELL_STATUS.verified,
        WELL_STATUS.prefill,
    )
    assert worse.with_losses_of(WELL_STATUS) == worse
    late = reduce_status(NEXT, reduce_status(NEXT, WELL_STATUS, now=2000), now=2600)
    assert told(late)[Type.DEGRADED] is Truth.TRUE
    again = late.with_losses_of(reduce_status(replace(NEXT, target="another"), late, now=2700))
    assert told(again)[Type.DEGRADED] is Truth.TRUE, "nothing has moved"


LEAVING = replace(NEXT, decode=replace(HALF_WAY, terminating=1))


def test_a_pod_that_was_told_to_go_and_is_gone_is_progress_also_long_after_the_deadline() -> None:
    status = reduce_status(LEAVING, reduce_status(LEAVING, WELL_STATUS, now=2000), now=2600)
    assert progressing(status)[0] is Reason.PROGRESS_DEADLINE_EXCEEDED
    assert progressing(reduce_status(NEXT, status, now=9000)) == (Reason.ROLLING_OUT, 9000)


def test_a_pod_that_goes_in_a_crash_loop_is_no_progress() -> None:
    loop = Problems(decode="it dies", crash_loop="it dies")
    status = reduce_status(replace(LEAVING, problems=loop), reduce_status(LEAVING, WELL_STATUS, now=2000), now=2100)
    assert progressing(reduce_status(replace(NEXT, problems=loop), status, now=2200)) == (Reason.CRASH_LOOP, 2000)


def test_a_spec_that_was_changed_begins_the_deadline_anew_and_ends_no_crash_loop() -> None:
    changed = replace(NEXT, generation=NEXT.generation + 1)
    late = reduce_status(NEXT, reduce_status(NEXT, WELL_STATUS, now=2000), now=2600)
    assert progressing(late)[0] is Reason.PROGRESS_DEADLINE_EXCEEDED
    assert progressing(reduce_status(changed, late, now=9000)) == (Reason.ROLLING_OUT, 9000)
    looping = reduce_status(LOOPING, reduce_status(NEXT, WELL_STATUS, now=2000), now=2100)
    assert progressing(reduce_status(changed, looping, now=2200)) == (Reason.CRASH_LOOP, 2200)


def test_losses_are_no_progress() -> None:
    status = reduce_status(NEXT, WELL_STATUS, now=2000)
    worse = replace(NEXT, decode=replace(HALF_WAY, ready=1, terminating=1))
    assert progressing(reduce_status(worse, status, now=2500))[1] == 2000


@pytest.mark.parametrize("held", [replace(NEXT, is_paused=True), replace(NEXT, refusal="no")])
def test_time_that_a_rollout_is_held_does_not_count(held: Facts) -> None:
    status = reduce_status(held, reduce_status(NEXT, WELL_STATUS, now=2000), now=2100)
    assert deadline_at(status, 600) is None
    assert progressing(reduce_status(NEXT, status, now=99_000)) == (Reason.ROLLING_OUT, 99_000)


def test_old_ones_that_come_back_long_after_a_rollout_begin_a_new_one() -> None:
    stray = replace(WELL, decode=replace(ALL_READY, replicas=3))
    assert progressing(reduce_status(stray, WELL_STATUS, now=99_000)) == (Reason.ROLLING_OUT, 99_000)


def test_a_stop_is_complete_however_long_its_engines_take_to_go() -> None:
    leaving = Counts(replicas=1, updated=1, ready=1, updated_ready=1, terminating=1)
    status = WELL_STATUS
    for now in (2000, 2001, 99_000):
        status = reduce_status(replace(WELL, prefill=leaving, decode=leaving), status, now=now)
        assert progressing(status)[0] is Reason.ROLLOUT_COMPLETE
        assert status.reason(Type.DEGRADED) is Reason.AS_WANTED


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_pool_that_is_started_again_has_a_deadline_and_wakes_nobody(wanted: int) -> None:
    stopped = replace(WELL, prefill=Counts(), decode=Counts(), is_target_empty=True)
    none = Counts(wanted=wanted, least=1)
    starts = replace(stopped, prefill=none, decode=none, verification=Verification.NOT_ASKED)
    status = reduce_status(starts, reduce_status(stopped, WELL_STATUS, now=2000), now=9000)
    assert progressing(status) == (Reason.ROLLING_OUT, 9000)
    assert status.reason(Type.DEGRADED) is Reason.AS_WANTED
    assert progressing(reduce_status(starts, status, now=9600))[0] is Reason.PROGRESS_DEADLINE_EXCEEDED


LOOPING = replace(NEXT, problems=Problems(prefill="it dies", crash_loop="it dies"))


def test_a_crash_loop_holds_between_two_deaths_and_for_the_next_operator_until_something_gets_better() -> None:
    status = reduce_status(LOOPING, reduce_status(NEXT, WELL_STATUS, now=2000), now=2100)
    assert progressing(status) == (Reason.CRASH_LOOP, 2000)
    status = reduce_status(NEXT, status, now=2200)
    assert progressing(status) == (Reason.CRASH_LOOP, 2000)
    better = replace(NEXT, prefill=replace(HALF_WAY, ready=3, updated_ready=1))
    assert progressing(reduce_status(better, status, now=2300)) == (Reason.ROLLING_OUT, 2300)
    assert progressing(reduce_status(replace(NEXT, target="another"), status, now=2300))[0] is Reason.ROLLING_OUT


def test_an_engine_that_is_made_anew_after_each_death_is_no_progress() -> None:
    """As LeaderWorkerSets do."""
    gone = replace(LOOPING, prefill=replace(HALF_WAY, replicas=2, updated=0))
    status = reduce_status(LOOPING, reduce_status(NEXT, WELL_STATUS, now=2000), now=2100)
    for now in (2200, 2300, 2400):
        status = reduce_status(LOOPING, reduce_status(gone, status, now=now), now=now + 50)
        assert progressing(status)[0] is Reason.CRASH_LOOP
    # The old ones that went with it were progress; what came back was none.
    assert progressing(status)[1] == 2000


def test_a_crash_loop_misses_the_deadline_too() -> None:
    status = reduce_status(LOOPING, reduce_status(NEXT, WELL_STATUS, now=2000), now=2100)
    assert deadline_at(status, 600) == 2600
    status = reduce_status(LOOPING, status, now=2600)
    assert progressing(status) == (Reason.PROGRESS_DEADLINE_EXCEEDED, 2000)
    found = status.condition(Type.PROGRESSING)
    assert found is not None
    assert found.message.endswith(": it dies")


def test_a_crash_loop_of_a_router_is_over_when_all_routers_are_ready_however_long_engines_still_load() -> None:
    dies = replace(NEXT, routers_ready=1, problems=Problems(routers="it dies", crash_loop="it dies"))
    status = reduce_status(dies, reduce_status(NEXT, WELL_STATUS, now=2000), now=2100)
    assert progressing(status)[0] is Reason.CRASH_LOOP
    between_deaths = replace(dies, problems=Problems())
    assert progressing(reduce_status(between_deaths, status, now=2110))[0] is Reason.CRASH_LOOP
    status = reduce_status(NEXT, status, now=2200)
    assert progressing(status) == (Reason.ROLLING_OUT, 2000)
    assert status.reason(Type.DEGRADED) is not Reason.CRASH_LOOP
