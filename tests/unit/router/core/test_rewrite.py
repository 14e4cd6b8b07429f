"""The two bodies made of the client's one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.engine import reservation_of
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_decode_params, parse_reservation, to_wire
from pdcluster_router.core.rewrite import DEFAULT_OUTPUT_TOKENS, BadBody, parse_body

PARAMS = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)
RESERVATION = parse_reservation(reservation_of(to_wire(PARAMS)))


def decode_body(fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(parse_body(json.dumps(fields).encode()).for_decode(PARAMS))
    return body


def prefill_body(fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(parse_body(json.dumps(fields).encode()).for_prefill(RESERVATION))
    return body


def test_decode_gets_everything_that_the_client_sent_and_our_parameters() -> None:
    fields = {"prompt": "a", "stream": True, "logprobs": 2, "x": [1.5, None, "é"]}
    body = decode_body(fields)
    assert parse_decode_params(body.pop("kv_transfer_params")) == PARAMS
    assert body == fields


def test_parameters_that_the_client_sent_never_reach_an_engine() -> None:
    fields = {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True, "remote_host": "evil"}}
    assert "evil" not in json.dumps(decode_body(fields))
    assert "evil" not in json.dumps(prefill_body(fields))
    assert "kv_transfer_params" not in json.loads(parse_body(json.dumps(fields).encode()).for_decode(None))


def test_prefill_makes_one_token_and_does_not_stream() -> None:
    tools = [{"type": "function"}]
    fields = {
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "tools": tools,
    }
    body = prefill_body(fields)
    assert parse_reservation(body.pop("kv_transfer_params")) == RESERVATION
    assert body == {"messages": [], "stream": False, "max_tokens": 1, "min_tokens": 1, "tools": tools}


def test_the_newer_name_of_the_limit_is_set_only_where_the_client_used_it() -> None:
    assert prefill_body({"max_completion_tokens": 7})["max_completion_tokens"] == 1
    assert "max_completion_tokens" not in prefill_body({})


@pytest.mark.parametrize(
    ("fields", "is_local"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": "a", "n": 1, "best_of": 1}, False),
        ({"prompt": "a", "n": None}, False),
        ({"prompt": "a", "n": 2}, True),
        ({"prompt": "a", "best_of": 3}, True),
        ({"messages": [], "n": 4}, True),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": [[1, 2]]}, False),
        ({"prompt": []}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": "a", "use_beam_search": True}, True),
        ({"prompt": "a", "prompt_logprobs": 0}, True),
        ({"prompt": "a", "echo": True}, False),
        ({"prompt": "a", "echo": True, "logprobs": 1}, True),
        ({"prompt": None, "prompt_embeds": "x"}, True),
    ],
)
def test_what_decode_must_prefill_by_itself(fields: dict[str, Any], is_local: bool) -> None:
    assert parse_body(json.dumps(fields).encode()).needs_local_prefill is is_local


@pytest.mark.parametrize(
    ("fields", "output"),
    [({}, DEFAULT_OUTPUT_TOKENS), ({"max_tokens": 7}, 7), ({"max_tokens": 7, "max_completion_tokens": 9}, 9)],
)
def test_the_estimate_is_prompt_bytes_and_the_limit(fields: dict[str, Any], output: int) -> None:
    raw = json.dumps(fields).encode()
    assert parse_body(raw).estimated_tokens == len(raw) // 4 + output


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b'"x"', b"null", b"NaN", b"\xff", b'{"a": "\\ud800"}'])
def test_what_is_no_json_object_is_a_bad_body(raw: bytes) -> None:
    with pytest.raises(BadBody):
        parse_body(raw)


def test_what_can_be_read_but_not_written_is_a_bad_body() -> None:
    body = parse_body(b'{"a":' + b"[" * 600 + b"]" * 600 + b"}")
    with pytest.raises(BadBody):
        body.for_decode(PARAMS)
