"""What a user is told, and that there is something to tell for every trouble."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from pdcluster_operator.core.status.conditions import Counts, EventReason, Reason, Status
from pdcluster_operator.core.status.explain import WAITS_FOR_PODS, explain, explain_events
from pdcluster_operator.core.status.pool_status import Facts, Problems, Verification, reduce_status

READY: Final = Counts(wanted=1, least=1, replicas=1, updated=1, ready=1, updated_ready=1)
WELL: Final = Facts(1, "0a1b.2c3d.4e5f", READY, READY, 1, 1, 600, verification=Verification.PASSED)
STARTING: Final = replace(
    WELL, decode=Counts(wanted=1, least=1, replicas=1, updated=1), verification=Verification.NOT_ASKED
)

GOOD: Final = {
    Reason.VALID,
    Reason.INSTANCES_READY,
    Reason.ROUTERS_READY,
    Reason.VERIFIED,
    Reason.ROLLOUT_COMPLETE,
    Reason.AS_WANTED,
    Reason.SERVING,
}


def told(facts: Facts, now: int = 0, before: Status | None = None) -> tuple[str, ...]:
    return explain(reduce_status(facts, before, now=now), facts.generation)


def test_there_is_a_cure_for_every_reason_that_is_no_good_news() -> None:
    assert {reason for reason in Reason if reason.cure} == set(Reason) - GOOD


def test_an_event_that_tells_of_no_condition_is_told_once_with_its_cure_even_if_its_message_was_cut() -> None:
    reason = EventReason.TAKEN_BACK
    told = f"{reason.value} (a was set by b, and was taken back). {reason.cure}"
    whole, cut = f"a was set by b, and was taken back. {reason.cure}", "a was set by b, and was taken back"
    events = [("Serving", "Ready: "), (reason.value, whole), (reason.value, cut), ("Scheduled", "of others")]
    assert explain_events(events) == (told,)
    assert all(reason.cure for reason in EventReason)


def test_all_is_well() -> None:
    assert told(WELL) == ("Ready: 1 prefill and 1 decode instances serve 0a1b.2c3d.4e5f.",)


def test_fields_that_are_left_out_are_told_although_all_is_well() -> None:
    [sentence] = told(replace(WELL, unknown_fields=("spec.transfer.rails",)))
    assert sentence.startswith("Accepted is True (the spec is carried out without spec.transfer.rails")


def test_a_refused_spec_is_the_one_thing_to_mend() -> None:
    refused = replace(WELL, refusal="prefill has block size 16, decode 32: make them equal", routers_ready=0)
    assert told(refused) == (
        f"Accepted is False (prefill has block size 16, decode 32: make them equal). {Reason.REFUSED.cure}",
    )


def test_what_is_not_ready_is_told_with_numbers_before_what_follows_from_it() -> None:
    assert [sentence.split(".")[0] for sentence in told(STARTING)] == [
        "DecodeReady is False (0 of 1 decode instances are up to date and ready)",
        "TransferVerified is Unknown (no request was sent through 0a1b",
        "Progressing is True (prefill 1 of 1 up to date and ready, 0 old, decode 0 of 1 up to date and ready, 0 old)",
    ]


def test_a_fault_that_two_conditions_show_is_told_once() -> None:
    failed = replace(WELL, verification=Verification.FAILED, verification_error="no route to decode-0")
    sentences = told(failed, before=reduce_status(WELL, None, now=0))
    assert sentences == (f"TransferVerified is False (no route to decode-0). {Reason.VERIFICATION_FAILED.cure}",)


def test_a_stopped_cluster_has_one_reason() -> None:
    sentences = told(replace(WELL, prefill=Counts(), decode=Counts()))
    assert sentences == (f"PrefillReady is False (no prefill instance is wanted). {Reason.SCALED_TO_ZERO.cure}",)


def test_an_object_that_no_operator_has_seen() -> None:
    assert "has not looked" in explain(Status(0, "", "", Counts(), Counts()), 1)[0]


@pytest.mark.parametrize(
    ("problems", "routers"),
    [
        (Problems(decode="pod d, container engine: ImagePullBackOff: 401"), 1),
        (Problems(routers="pod r, container router: ImagePullBackOff: 401"), 0),
        (Problems(decode="pod d died 3 times", crash_loop="pod d died 3 times"), 1),
    ],
)
def test_nobody_is_told_that_there_is_nothing_to_do_about_a_rollout_beside_a_pod_in_trouble(
    problems: Problems, routers: int
) -> None:
    sentences = told(replace(STARTING, problems=problems, routers_ready=routers))
    assert [one for one in sentences if Reason.ROLLING_OUT.cure in one] == []
    assert [one for one in sentences if WAITS_FOR_PODS in one or Reason.CRASH_LOOP.cure in one]


def test_a_crash_loop_is_told_with_its_cause_and_its_cure() -> None:
    loop = "pod d, container engine died 3 times, the last time OOMKilled (exit code 137)"
    sentences = told(replace(STARTING, problems=Problems(decode=loop, crash_loop=loop)))
    assert f"Progressing is False ({loop}). {Reason.CRASH_LOOP.cure}" in sentences
    assert len([one for one in sentences if Reason.CRASH_LOOP.cure in one]) == 1
