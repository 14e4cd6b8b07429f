"""What a status says of what was found, and when it changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from operator_cases.statuses import ALL_READY, FAILED_STATUS, FIRST, HALF_WAY, NEXT, WELL, WELL_STATUS
from pdcluster_operator.core.rollout.fleet import RoleFleet, Workload
from pdcluster_operator.core.status.conditions import Counts, Reason, Status, Truth, Type, counts_of
from pdcluster_operator.core.status.pool_status import Facts, Problems, Verification, reduce_status
from pdcluster_operator.core.status.status_events import EventKind, KubernetesEvent, events_between

LOOP: Final = "pod x, container engine died 3 times, the last time OOMKilled (exit code 137)"


def said(facts: Facts, before: Status | None = None, now: int = 1000) -> dict[str, str]:
    """Condition to truth and reason."""
    status = reduce_status(facts, before, now=now)
    return {found.type.value: f"{found.truth.value} {found.reason.value}" for found in status.conditions}


NEW_ENGINES_START: Final = {
    "PrefillReady": "False InstancesNotReady",
    "DecodeReady": "False InstancesNotReady",
    "TransferVerified": "Unknown VerificationPending",
    "Ready": "False InstancesNotReady",
}
UNPROVEN: Final = {
    "TransferVerified": "Unknown VerificationPending",
    "Progressing": "True RollingOut",
    "Ready": "False VerificationPending",
}
DISPROVEN: Final = {
    "TransferVerified": "False VerificationFailed",
    "Degraded": "True VerificationFailed",
    "Ready": "False VerificationFailed",
}
STOPPED: Final = {
    "PrefillReady": "False ScaledToZero",
    "DecodeReady": "False ScaledToZero",
    "TransferVerified": "Unknown ScaledToZero",
    "Ready": "False ScaledToZero",
}
CRASH_LOOP: Final = {"Progressing": "False CrashLoop", "Degraded": "True CrashLoop"}
GONE: Final = Counts(wanted=2, least=1, replicas=0, updated=0)
HALF_WAY_STATUS: Final = reduce_status(NEXT, WELL_STATUS, now=1000)
STORIES: Final[dict[str, tuple[Facts, Status | None, dict[str, str]]]] = {
    "all is well": (WELL, None, {}),
    "a new spec whose engines are not there yet, and all that have served are lost": (
        replace(NEXT, prefill=GONE, decode=GONE),
        WELL_STATUS,
        {**NEW_ENGINES_START, "Progressing": "True RollingOut", "Degraded": "True TooFewReady"},
    ),
    "the order of groups holds the rollout up": (
        replace(NEXT, held_by_groups="group 0 is not ready"),
        WELL_STATUS,
        {**UNPROVEN, **NEW_ENGINES_START, "Progressing": "False HeldByGroups"},
    ),
    "more are wanted of what serves": (
        replace(WELL, prefill=replace(ALL_READY, wanted=9, least=8), verification=Verification.NOT_ASKED),
        replace(WELL_STATUS, conditions=HALF_WAY_STATUS.conditions),
        {
            "PrefillReady": "False InstancesNotReady",
            "Progressing": "True RollingOut",
            "Ready": "False InstancesNotReady",
        },
    ),
    "the first start is no fault yet": (
        FIRST,
        None,
        {**NEW_ENGINES_START, "RouterReady": "False RoutersNotReady", "Progressing": "True RollingOut"},
    ),
    "pods are up, nobody has asked yet: not ready": (
        replace(WELL, verification=Verification.NOT_ASKED),
        None,
        UNPROVEN,
    ),
    "pods are up, and no transfer works": (
        replace(WELL, verification=Verification.FAILED, verification_error="no route from prefill-0 to decode-0"),
        None,
        {**DISPROVEN, "Progressing": "True RollingOut"},
    ),
    "what an operator before this one has verified stays verified": (
        replace(WELL, verification=Verification.NOT_ASKED),
        WELL_STATUS,
        {},
    ),
    "what failed for an operator before this one has failed until it is asked again": (
        replace(WELL, verification=Verification.NOT_ASKED),
        FAILED_STATUS,
        {**DISPROVEN, "Progressing": "True RollingOut"},
    ),
    "what failed for engines that are gone says nothing of those to come": (
        replace(WELL, verification=Verification.NOT_ASKED, is_target_empty=True),
        FAILED_STATUS,
        UNPROVEN,
    ),
    "what failed for another target says nothing of this one": (
        replace(WELL, target="ffff.2c3d.4e5f", verification=Verification.NOT_ASKED),
        FAILED_STATUS,
        UNPROVEN,
    ),
    "what failed once and passes now is well": (WELL, FAILED_STATUS, {}),
    "a transfer fails that worked once": (
        replace(WELL, verification=Verification.FAILED, verification_error="timeout"),
        WELL_STATUS,
        DISPROVEN,
    ),
    "a rollout with enough ready ones is not ready and not degraded": (
        NEXT,
        WELL_STATUS,
        {**NEW_ENGINES_START, "Progressing": "True RollingOut"},
    ),
    "a rollout in which too many die is degraded": (
        replace(NEXT, decode=replace(HALF_WAY, ready=0)),
        WELL_STATUS,
        {**NEW_ENGINES_START, "Progressing": "True RollingOut", "Degraded": "True TooFewReady"},
    ),
    "a pod that dies after the rollout is no failed rollout": (
        replace(WELL, decode=replace(ALL_READY, ready=1, updated_ready=1)),
        WELL_STATUS,
        {"DecodeReady": "False InstancesNotReady", "Ready": "False InstancesNotReady"},
    ),
    "all of a role die after the rollout": (
        replace(WELL, decode=replace(ALL_READY, ready=0, updated_ready=0)),
        WELL_STATUS,
        {
            "DecodeReady": "False InstancesNotReady",
            "Degraded": "True TooFewReady",
            "Ready": "False InstancesNotReady",
        },
    ),
    "a paused rollout": (
        replace(NEXT, is_paused=True),
        WELL_STATUS,
        {**NEW_ENGINES_START, "Progressing": "Unknown RolloutPaused"},
    ),
    "a refused spec does not make what runs worse": (
        replace(WELL, generation=4, refusal="roles.prefill has block size 16, roles.decode 32: make them equal"),
        WELL_STATUS,
        {"Accepted": "False Refused", "Progressing": "Unknown NotAccepted", "Ready": "False Refused"},
    ),
    "none are wanted": (
        replace(WELL, prefill=Counts(), decode=Counts()),
        WELL_STATUS,
        STOPPED,
    ),
    "none were ever wanted": (
        replace(WELL, prefill=Counts(), decode=Counts(), verification=Verification.NOT_ASKED),
        None,
        STOPPED,
    ),
    "one of two routers is lost": (
        replace(WELL, routers_ready=1),
        WELL_STATUS,
        {"RouterReady": "False RoutersNotReady", "Ready": "False RoutersNotReady"},
    ),
    "the Secret with the clients' keys is not there, and routers without keys serve": (
        replace(WELL, missing_secret="there is no Secret team/clients"),
        WELL_STATUS,
        {"RouterReady": "False RoutersNotReady", "Ready": "False RoutersNotReady"},
    ),
    "the last router is lost": (
        replace(WELL, routers_ready=0),
        WELL_STATUS,
        {
            "RouterReady": "False RoutersNotReady",
            "Degraded": "True TooFewReady",
            "Ready": "False RoutersNotReady",
        },
    ),
    "a new engine dies again and again beside old ones that serve": (
        replace(NEXT, problems=Problems(prefill=LOOP, crash_loop=LOOP)),
        WELL_STATUS,
        {**NEW_ENGINES_START, **CRASH_LOOP},
    ),
    "the first engines die again and again": (
        replace(FIRST, routers_ready=2, problems=Problems(prefill=LOOP, crash_loop=LOOP)),
        None,
        {**NEW_ENGINES_START, **CRASH_LOOP},
    ),
    "a new router dies again and again, and the old ones are enough": (
        replace(WELL, problems=Problems(routers=LOOP, crash_loop=LOOP)),
        WELL_STATUS,
        {"Degraded": "True CrashLoop"},
    ),
}
ALL_WELL: Final = {
    "Accepted": "True Valid",
    "PrefillReady": "True InstancesReady",
    "DecodeReady": "True InstancesReady",
    "RouterReady": "True RoutersReady",
    "TransferVerified": "True Verified",
    "Progressing": "True RolloutComplete",
    "Degraded": "False AsWanted",
    "Ready": "True Serving",
}


@pytest.mark.parametrize(("facts", "before", "differing"), STORIES.values(), ids=list(STORIES))
def test_conditions_that_differ_from_all_is_well(
    facts: Facts, before: Status | None, differing: dict[str, str]
) -> None:
    assert said(facts, before) == {**ALL_WELL, **differing}


def test_every_condition_has_the_generation_it_was_found_for() -> None:
    assert {found.observed_generation for found in reduce_status(NEXT, WELL_STATUS, now=1).conditions} == {4}


def test_a_condition_keeps_its_time_until_its_truth_changes() -> None:
    worse = replace(WELL, decode=replace(ALL_READY, ready=1, updated_ready=1))
    status = reduce_status(worse, WELL_STATUS, now=2000)
    times = {found.type: found.transition_s for found in status.conditions}
    changed = {Type.DECODE_READY, Type.READY}
    assert times == {kind: 2000 if kind in changed else 1000 for kind in Type}


def test_a_message_names_the_numbers_and_what_the_cluster_says() -> None:
    problems = Problems(prefill="pod p-0: 0/3 nodes have cuda.example/gpu", routers="pod r: ImagePullBackOff")
    status = reduce_status(replace(FIRST, problems=problems), None, now=0)
    told = {kind: found.message for kind in Type if (found := status.condition(kind))}
    assert told[Type.PREFILL_READY] == (
        "0 of 2 prefill instances are up to date and ready: pod p-0: 0/3 nodes have cuda.example/gpu"
    )
    assert told[Type.DECODE_READY] == "0 of 2 decode instances are up to date and ready"
    assert told[Type.ROUTER_READY] == "0 of 2 routers are ready: pod r: ImagePullBackOff"


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (WELL, "2 of 2 routers are ready; held back"),
        (replace(WELL, problems=Problems(routers="pod r: stuck")), "2 of 2 routers are ready: pod r: stuck; held back"),
        (replace(WELL, missing_secret="no Secret"), "2 of 2 routers are ready: no Secret; held back"),
        (replace(WELL, routers_ready=1), "1 of 2 routers are ready; held back"),
    ],
    ids=["all ready", "a problem", "a missing Secret", "too few"],
)
def test_gateways_that_are_led_to_old_routers_change_the_message_and_no_condition(facts: Facts, told: str) -> None:
    with_it, without = (
        reduce_status(one, WELL_STATUS, now=1) for one in (replace(facts, held_back="held back"), facts)
    )
    found = with_it.condition(Type.ROUTER_READY)
    assert found is not None
    assert found.message == told
    assert [(one.truth, one.reason) for one in with_it.conditions] == [
        (one.truth, one.reason) for one in without.conditions
    ]


def test_a_pager_hears_why_fewer_are_ready_than_promised() -> None:
    lost = replace(
        WELL, decode=replace(ALL_READY, ready=0, updated_ready=0), problems=Problems(decode="pod d: Evicted")
    )
    found = reduce_status(lost, WELL_STATUS, now=2000).condition(Type.DEGRADED)
    assert found is not None
    assert found.message == "0 decode instances are ready, 1 were promised: pod d: Evicted"


def test_a_failed_verification_of_another_target_does_not_forget_the_verified_one() -> None:
    failed = replace(NEXT, verification=Verification.FAILED, verification_error="timeout")
    assert reduce_status(failed, WELL_STATUS, now=2000).verified == WELL.target
    failed = replace(WELL, verification=Verification.FAILED, verification_error="timeout")
    assert reduce_status(failed, WELL_STATUS, now=2000).verified == ""


def test_a_stop_takes_the_proof_back_for_other_engines_come_after_it() -> None:
    stopped = replace(WELL, prefill=Counts(), decode=Counts())
    assert reduce_status(stopped, WELL_STATUS, now=2000).verified == ""
    refused = replace(stopped, refusal="overrides do not merge")
    assert reduce_status(refused, WELL_STATUS, now=2000).verified == WELL.target


@pytest.mark.parametrize(
    ("facts", "remembered", "verified"),
    [
        pytest.param({}, "", WELL.target, id="a pass"),
        pytest.param({}, "another", WELL.target, id="a pass after one of another target"),
        pytest.param({"verification": Verification.NOT_ASKED}, WELL.target, WELL.target, id="it is remembered"),
        pytest.param({"verification": Verification.NOT_ASKED}, "another", "another", id="of another target too"),
        pytest.param({"is_target_empty": True}, WELL.target, "", id="a pass of engines that are gone"),
        pytest.param({"is_target_empty": True}, "", "", id="a pass of engines that are gone, never written"),
        pytest.param({"is_target_empty": True}, "another", "another", id="engines of the other target may be there"),
        pytest.param({"is_target_empty": True, "refusal": "no"}, WELL.target, "", id="a refusal brings none back"),
        pytest.param({"prefill": Counts(), "decode": Counts()}, WELL.target, "", id="a stop"),
        pytest.param({"verification": Verification.FAILED}, WELL.target, "", id="a failure"),
        pytest.param({"verification": Verification.FAILED}, "another", "another", id="a failure of this target alone"),
    ],
)
def test_what_is_verified(facts: dict[str, Any], remembered: str, verified: str) -> None:
    before = replace(WELL_STATUS, verified=remembered)
    assert reduce_status(replace(WELL, **facts), before, now=2000).verified == verified


def test_events_are_sent_for_changes_only() -> None:
    assert events_between(WELL_STATUS, reduce_status(WELL, WELL_STATUS, now=5000)) == ()
    status = reduce_status(replace(NEXT, decode=replace(HALF_WAY, ready=1)), WELL_STATUS, now=2000)
    later = reduce_status(replace(NEXT, prefill=replace(HALF_WAY, ready=3, updated_ready=1)), status, now=2001)
    assert events_between(status, later) == ()


def test_events_say_what_became_of_which_condition() -> None:
    failed = replace(WELL, verification=Verification.FAILED, verification_error="timeout")
    assert events_between(WELL_STATUS, reduce_status(failed, WELL_STATUS, now=2000)) == (
        KubernetesEvent(EventKind.WARNING, "VerificationFailed", "TransferVerified: timeout"),
    )


def test_a_sum_has_an_event_only_where_no_part_said_its_reason_in_the_same_look() -> None:
    """In a large cluster most writes are Events: one fault of a pod shall not be three."""
    worse = replace(WELL, decode=replace(ALL_READY, ready=0, updated_ready=0))
    status = reduce_status(worse, WELL_STATUS, now=2000)
    told = [event.message.partition(":")[0] for event in events_between(WELL_STATUS, status)]
    assert told == ["DecodeReady", "Degraded"]
    told = [event.message.partition(":")[0] for event in events_between(status, WELL_STATUS)]
    assert told == ["DecodeReady", "Degraded", "Ready"]


def test_a_first_look_tells_what_is_true_or_wrong_and_not_what_is_not_yet() -> None:
    events = events_between(None, reduce_status(FIRST, None, now=0))
    assert [event.reason for event in events] == ["Valid", "RollingOut"]
    refused = events_between(None, reduce_status(replace(FIRST, refusal="block sizes differ"), None, now=0))
    assert refused[0] == KubernetesEvent(EventKind.WARNING, "Refused", "Accepted: block sizes differ")


def test_counts_are_of_all_workloads_of_a_role() -> None:
    target, old = Workload("n", "B", 2, 1, 1, 0), Workload("o", "A", 1, 2, 2, 1)
    assert counts_of(RoleFleet(target, 3, 1, 1, (old,))) == Counts(
        wanted=3, least=2, replicas=3, updated=1, ready=3, updated_ready=1, terminating=1
    )


def test_ready_is_true_only_when_all_that_it_needs_is_true() -> None:
    for facts, before, _ in STORIES.values():
        status = reduce_status(facts, before, now=1)
        truths = {found.type: found.truth is Truth.TRUE for found in status.conditions}
        is_ready = truths.pop(Type.READY)
        needed = set(truths) - {Type.PROGRESSING, Type.DEGRADED}
        assert is_ready == all(truths[kind] for kind in needed)


def test_what_holds_a_rollout_up_is_told_beside_a_crash_loop_and_a_deadline_and_once() -> None:
    held = replace(NEXT, held_by_groups="group 0 is not ready", problems=Problems(decode=LOOP, crash_loop=LOOP))
    told = f"{LOOP}; the rollout is held up: group 0 is not ready"
    status = reduce_status(held, WELL_STATUS, now=2000)
    assert message_of(status) == told
    between = reduce_status(replace(held, problems=Problems()), status, now=2001)
    assert message_of(between) == told, "the container is between two lives"
    assert message_of(reduce_status(replace(NEXT, problems=Problems()), between, now=2002)) == LOOP
    assert message_of(reduce_status(held, between, now=2000 + NEXT.deadline_s)).endswith(f"old: {told}")


def test_a_paused_rollout_is_held_up_by_nothing_else() -> None:
    paused = replace(NEXT, held_by_groups="group 0 is not ready", is_paused=True)
    assert "group" not in message_of(reduce_status(paused, WELL_STATUS, now=2000))


def message_of(status: Status) -> str:
    progressing = status.condition(Type.PROGRESSING)
    assert progressing is not None
    return progressing.message


def test_a_pool_that_was_stopped_and_changed_at_once_starts_as_if_for_the_first_time() -> None:
    stopped = reduce_status(replace(NEXT, prefill=Counts(), decode=Counts(), is_target_empty=True), WELL_STATUS, now=1)
    assert stopped.verified == "", "no engine of what was proven is left"
    starts = replace(NEXT, prefill=GONE, decode=GONE)
    assert reduce_status(starts, stopped, now=2).reason(Type.DEGRADED) is Reason.AS_WANTED
