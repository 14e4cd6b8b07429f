"""The metaserver's reply: only one word of it is good news."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt
from pdcluster_protocol.metaserver import Action, PrefillOutcome, decode_outcome, encode_outcome, failed, succeeded
from unit.protocol.messages import any_message


@given(any_message(PrefillOutcome, status=st.sampled_from(["ok", "failed"])))
def test_an_outcome_survives_json(outcome: PrefillOutcome) -> None:
    assert decode_outcome(encode_outcome(outcome)) == outcome


def test_prefill_that_worked_is_ok_and_all_else_is_not() -> None:
    assert succeeded(Attempt(1)).is_ok
    assert not failed("prefill engine p-0 is gone").is_ok


def test_failure_without_an_action_fails_the_request() -> None:
    assert failed("why") == PrefillOutcome("failed", "why", Action.FAIL)
    assert json.loads(encode_outcome(failed("why", Action.RECOMPUTE))) == {
        "status": "failed",
        "reason": "why",
        "action": "recompute",
        "attempt": 0,
    }


def test_the_short_reply_that_vllm_ascend_knows_is_enough() -> None:
    assert decode_outcome(b'{"status": "ok"}') == PrefillOutcome("ok")
    assert decode_outcome(encode_outcome(succeeded(Attempt(2)))) == PrefillOutcome("ok", attempt=2)


@pytest.mark.parametrize("status", ["OK", "", "done", "fail"])
def test_another_status_is_refused_and_both_good_ones_named(status: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode_outcome(json.dumps({"status": status}).encode())
    assert str(refused.value) == f"metaserver's reply has status {status!r}, not 'ok' or 'failed'"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "truncated"),
        (b"<html>", "malformed"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `status`"),
        (b'{"status": 200}', "Expected `str`, got `int`"),
        (b'{"status": "ok", "colour": "red"}', "unknown field `colour`"),
        (b'{"status": "failed", "action": "pray"}', "Invalid enum value 'pray'"),
    ],
)
def test_what_is_no_outcome_is_refused_with_the_reason(body: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=f"metaserver's reply is not an outcome: .*{message}"):
        decode_outcome(body)
