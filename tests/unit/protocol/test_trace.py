"""Trace lines: what is written is read again, and later releases may say more."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.ids import Attempt, RequestId, TransferId
from pdcluster_protocol.trace import LayerTrace, PushTrace, ReceiveTrace, RequestTrace, TraceLine
from unit.protocol.messages import any_message

DECODER: msgspec.json.Decoder[TraceLine] = msgspec.json.Decoder(TraceLine)
WORDS: list[tuple[TraceLine, dict[str, object]]] = [
    (
        RequestTrace(transfer_id=TransferId("t"), request_id="r", received_at=1.5, status=200, client="c"),
        {
            "event": "request",
            "transfer_id": "t",
            "request_id": "r",
            "received_at": 1.5,
            "reserved_at": None,
            "prefill_sent_at": None,
            "prefill_replied_at": None,
            "first_byte_at": None,
            "ended_at": None,
            "status": 200,
            "prompt_tokens": None,
            "cached_tokens": None,
            "client": "c",
        },
    ),
    (
        PushTrace(
            transfer_id=TransferId("t"),
            request_id=RequestId("r"),
            attempt=Attempt(2),
            outcome="failed",
            reason="why",
            prompt_tokens=100,
            num_layers=1,
            num_bytes=8,
            is_content_compared=True,
            ranges=2,
            writes=1,
            forward_begin=1.0,
            forward_end=0.0,
            layers=(LayerTrace(1, 0, 1.0, 1.25, 1.5, 8),),
        ),
        {
            "event": "push",
            "transfer_id": "t",
            "request_id": "r",
            "attempt": 2,
            "decode_rank": 0,
            "outcome": "failed",
            "reason": "why",
            "prompt_tokens": 100,
            "num_layers": 1,
            "num_bytes": 8,
            "is_content_compared": True,
            "ranges": 2,
            "writes": 1,
            "forward_begin": 1.0,
            "forward_end": 0.0,
            "ended_at": None,
            "layers": [[1, 0, 1.0, 1.25, 1.5, 8]],
        },
    ),
    (
        ReceiveTrace(
            transfer_id=TransferId("t"),
            request_id=RequestId("r"),
            outcome="received",
            is_content_compared=True,
            expected_at=1.0,
            ended_at=2.0,
        ),
        {
            "event": "receive",
            "transfer_id": "t",
            "request_id": "r",
            "outcome": "received",
            "reason": "",
            "is_content_compared": True,
            "expected_at": 1.0,
            "ended_at": 2.0,
        },
    ),
]


@given(st.one_of(any_message(RequestTrace), any_message(PushTrace), any_message(ReceiveTrace)))
def test_a_line_survives_json(line: TraceLine) -> None:
    assert DECODER.decode(msgspec.json.encode(line)) == line


@pytest.mark.parametrize(("line", "words"), WORDS, ids=lambda it: type(it).__name__)
def test_the_words_are_those_of_earlier_releases(line: TraceLine, words: dict[str, object]) -> None:
    assert list(json.loads(msgspec.json.encode(line)).items()) == list(words.items())
    assert DECODER.decode(json.dumps({**words, "of_a_later_release": [1]}).encode()) == line
