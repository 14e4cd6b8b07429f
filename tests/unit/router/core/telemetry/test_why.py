"""Cause and cure: each way in which a request can end has its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tools.reference import errors

from pdcluster_protocol.kept import KeptRequest, Milestone, Moment
from pdcluster_router.core.apis.openai_errors import ENGINE_ERROR, ApiError
from pdcluster_router.core.telemetry.why import NOTHING, WORDS, explain, explained_by, failures_of
from pdcluster_router.telemetry.failures import FailureKind
from pdcluster_router.telemetry.metrics import Outcome

SENT = Moment(0.1, Milestone.DECODE_SENT.value, "decode-0")
NOT_OF_REQUESTS = {
    *("bad_pass", "not_verified", "not_verifiable", "too_many_verifications", "nothing_to_verify", "invalid_order"),
    *(
        "not_found",
        "responses_not_stored",
        "method_not_allowed",
        "not_ready",
        "no_role_engine",
        "no_answer",
        "answer_too_large",
    ),
}
"""Codes that no request on the hot paths is answered with; ``no_role_engine`` is made with ``decode`` alone."""


def ended(outcome: str, error: str = "", *failures: Moment, **more: Any) -> KeptRequest:
    return KeptRequest(
        request_id="r", ended_at_unix_s=1.0, outcome=outcome, error=error, moments=(SENT, *failures), **more
    )


def codes() -> list[str]:
    """Of all errors that the router makes."""
    made = [errors._made(function) for function in errors._functions()]
    assert all(isinstance(error, ApiError) for error in made)
    return sorted({error.code.lower() for error in made} - NOT_OF_REQUESTS)


@pytest.mark.parametrize("name", [*(kind.value for kind in FailureKind), *codes(), ENGINE_ERROR, "no_decode_engine"])
def test_each_failure_and_each_error_has_a_cause_and_a_cure_in_whole_words(name: str) -> None:
    words = WORDS[name]
    assert re.fullmatch(r"[a-zA-Z`].*[^.]", words.cause)
    assert re.fullmatch(r"[A-Z`].*\.", words.cure)
    told = explain(ended("lost", name))
    assert told == words


def test_no_words_are_left_over() -> None:
    bad_requests = {"invalid_request", "invalid_http", "invalid_timeout"}
    known = {kind.value for kind in FailureKind} | set(codes()) | bad_requests | {ENGINE_ERROR, "no_decode_engine"}
    assert WORDS.keys() == known


def test_a_request_that_went_well_needs_no_words() -> None:
    assert explain(ended("ok")) == NOTHING


def test_the_failure_that_the_error_is_about_comes_before_a_later_one() -> None:
    lost = Moment(0.2, "decode_lost", "decode-1", reason="it hung up")
    gone = Moment(0.3, "client_gone")
    assert explain(ended("lost", "decode_lost", lost, gone)).cause.endswith("(decode-1): it hung up")
    assert explain(ended("client_gone", "", lost, gone)).cause == WORDS["client_gone"].cause


def test_what_only_follows_from_a_failure_is_not_the_cause_of_it() -> None:
    lost, none = Moment(0.2, "decode_lost", "decode-0"), Moment(0.3, "no_decode", reason="all were tried")
    assert explain(ended("lost", "", lost, none)).cause.endswith("(decode-0)")
    assert explain(ended("unavailable", "", none)).cause.endswith("all were tried")


def test_of_several_failures_that_the_error_is_about_the_last_one_counts() -> None:
    tries = [Moment(0.2 + n, "prefill_failed", f"prefill-{n}", n + 1, "no") for n in range(3)]
    assert "(prefill-2): no" in explain(ended("prefill_failed", "prefill_failed", *tries)).cause


def test_what_was_made_good_is_told_of_a_request_that_went_well() -> None:
    told = explain(ended("ok", "", Moment(0.2, "attempt_lost", "prefill-0", 1, "rank 0 is silent")))
    assert told.cause.startswith("it was served, after a failure that was made good.")
    assert told.cause.endswith("(prefill-0): rank 0 is silent")
    assert told.cure == WORDS["attempt_lost"].cure


def test_an_end_without_an_outcome_is_a_bug_of_ours() -> None:
    assert explain(ended("")) == WORDS["internal_error"]


@pytest.mark.parametrize("progress", Milestone)
def test_each_thing_that_a_running_request_does_is_told(progress: Milestone) -> None:
    told = explain(KeptRequest(request_id="r", moments=(SENT, Moment(0.2, progress.value, "engine-1"))))
    assert told.cause.endswith("(engine-1)")
    assert told.cure


def test_a_request_in_the_queue_and_one_between_two_tries_are_told() -> None:
    assert "queue" in explain(KeptRequest(request_id="r")).cause
    assert "another one begins" in explain(KeptRequest(request_id="r", moments=(Moment(0, "decode_lost"),))).cause


def test_what_is_done_is_no_failure() -> None:
    done = tuple(Moment(0, progress.value) for progress in Milestone)
    failed = Moment(0, "deadline")
    assert failures_of(KeptRequest(request_id="r", moments=(*done, failed))) == [failed]


@pytest.mark.parametrize("outcome", [one for one in Outcome if one is not Outcome.OK])
def test_an_outcome_alone_as_an_access_log_has_it_is_no_bug_of_ours(outcome: Outcome) -> None:
    told = explain(ended(outcome.value))
    assert told != WORDS["internal_error"]
    assert re.fullmatch(r"[a-z].*[^.]", told.cause)
    assert re.fullmatch(r"[A-Z].*\.", told.cure)


def test_a_request_that_decode_serves_alone_waits_for_no_reservation() -> None:
    told = explain(KeptRequest(request_id="r", is_local_prefill=True, moments=(SENT,)))
    assert told.cause == "the decode engine computes the prompt itself (decode-0)"


@pytest.mark.parametrize("kind", ["prefill_exhausted", "reservation_lost"])
def test_after_the_last_try_decode_is_waited_for_and_no_other_try_is_promised(kind: str) -> None:
    told = explain(KeptRequest(request_id="r", moments=(SENT, Moment(0.2, kind))))
    assert "decode" in told.cause
    assert "another one begins" not in told.cause


def test_a_request_whose_client_has_all_waits_for_nothing_that_matters() -> None:
    assert explain(KeptRequest(request_id="r", outcome="ok", moments=(SENT,))) == NOTHING


def test_a_request_in_parts_is_told_by_the_part_that_it_waits_for() -> None:
    whole, part = KeptRequest(request_id="r", model="m"), KeptRequest(request_id="r-1", moments=(SENT,))
    told, words = explained_by(whole, part), explain(part)
    assert (told.request_id, told.model) == ("r", "m")
    assert (told.cause, told.cure) == (f"of its part r-1: {words.cause}", words.cure)
