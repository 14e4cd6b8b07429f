"""What the router reads of prefill's words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.prefill_answer import NOTHING_SAID, PrefillAnswer, prefill_answer_in

SECONDS = st.none() | st.floats(0, 1e6)


@given(st.builds(PrefillAnswer, st.text(max_size=50), SECONDS, SECONDS))
def test_prefills_words_are_found_in_its_answer(said: PrefillAnswer) -> None:
    reply = {"id": "cmpl-1", "choices": [], "kv_transfer_params": {**said.to_wire(), "pdcluster_is_whole": True}}
    assert prefill_answer_in(json.dumps(reply).encode()) == said


@pytest.mark.parametrize("times", [b'"pdcluster_queued_s": "1"', b'"pdcluster_computed_s": [1]'])
def test_times_that_cannot_be_read_hide_no_refusal(times: bytes) -> None:
    reply = b'{"kv_transfer_params": {"pdcluster_reason": "no seal", %b}}' % times
    assert prefill_answer_in(reply) == PrefillAnswer("no seal")


def test_nothing_is_said_in_no_bytes() -> None:
    assert NOTHING_SAID.to_wire() == {}


@pytest.mark.parametrize(
    "reply",
    [
        *(b"", b"not json", b"[]", b"{}"),
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": {"remote_block_ids": [1]}}',
        b'{"kv_transfer_params": {"pdcluster_reason": 5}}',
        b'{"kv_transfer_params": {"pdcluster_reason": "cut',
        b'{"kv_transfer_params": "text"}',
        b'{"kv_transfer_params": {"pdcluster_reason": "\xff"}}',
        b'{"kv_transfer_params": {"pdcluster_queued_s": "1"}}',
        b'{"x":' + b"[" * 9999,
    ],
)
def test_an_answer_without_words_has_none(reply: bytes) -> None:
    assert prefill_answer_in(reply) == NOTHING_SAID
