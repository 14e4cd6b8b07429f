"""Laws of Anthropic's Messages API in the router's core, over anything that may come."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fakes.messages import MessagesWords
from fakes.reservations import reservation_of
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_reservation, to_wire
from pdcluster_router.core.apis.anthropic_errors import error_event
from pdcluster_router.core.apis.messages import MessagesWatch, first_event, parse_messages, unfinished
from pdcluster_router.core.apis.openai_errors import bad_request
from pdcluster_router.core.apis.rewrite import BadBody
from pdcluster_router.core.apis.sse import error_of, first_event_end

PARAMS = DecodeParams(metaserver="http://r", transfer_id=TransferId("t"), deadline_ms=1)
RESERVATION = parse_reservation(reservation_of(to_wire(PARAMS)))
SIMPLE = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
JSON = st.recursive(
    SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
CHOICES = st.sampled_from(["tool", "any", "auto", "none"]).map(lambda kind: {"type": kind, "name": "f"}) | JSON
KEYS = st.sampled_from(["messages", "system", "stream", "max_tokens", "n", "prompt", "ec_transfer_params"]) | st.text()
BODIES = st.builds(
    lambda fields, choice: {**fields, "tool_choice": choice}, st.dictionaries(KEYS, JSON, max_size=6), CHOICES
)
OURS = {"kv_transfer_params", "ec_transfer_params", "stream", "max_tokens", "tool_choice"}
TEXTS = st.lists(st.text(min_size=1), min_size=1, max_size=4)


def names_a_tool(choice: object) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "tool"


@given(BODIES)
def test_prefill_gets_the_same_prompt_and_always_one_token_and_no_key_more(fields: dict[str, Any]) -> None:
    body = json.loads(b"".join(parse_messages(json.dumps(fields).encode()).for_prefill(RESERVATION)))
    assert (body["stream"], body["max_tokens"]) == (False, 1)
    assert parse_reservation(body["kv_transfer_params"]) == RESERVATION
    choice = fields["tool_choice"]
    assert body["tool_choice"] == ({"type": "any"} if names_a_tool(choice) else choice)
    assert body.get("ec_transfer_params") is None
    assert {key: value for key, value in body.items() if key not in OURS} == {
        key: value for key, value in fields.items() if key not in OURS
    }


@given(BODIES)
def test_decode_gets_the_clients_bytes(fields: dict[str, Any]) -> None:
    raw = json.dumps({key: value for key, value in fields.items() if key != "ec_transfer_params"}).encode()
    assert b"".join(parse_messages(raw).for_decode(None)) == raw


@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_a_bad_one(raw: bytes) -> None:
    with contextlib.suppress(BadBody):
        assert parse_messages(raw).num_bytes == len(raw)


@given(JSON)
def test_an_answer_is_whole_if_and_only_if_its_own_stop_reason_is_a_text(value: object) -> None:
    raw = json.dumps(value).encode()
    is_whole = isinstance(value, dict) and isinstance(value.get("stop_reason"), str)
    assert (unfinished(raw) == "") is is_whole
    assert unfinished(json.dumps({"content": value, "stop_reason": "end_turn"}).encode()) == ""
    assert unfinished(json.dumps({"content": value, "stop_reason": None}).encode())


@given(st.binary(max_size=60))
def test_no_bytes_break_the_look_at_an_answer(raw: bytes) -> None:
    assert isinstance(unfinished(raw), str)
    assert first_event(raw)[1] <= len(raw)


@given(TEXTS, st.lists(st.integers(1, 400), max_size=6), st.booleans())
def test_a_stream_passes_whole_and_only_a_whole_one_ends_well(
    tokens: list[str], cuts: list[int], is_given_up: bool
) -> None:
    words = MessagesWords({}, tokens, "", None)
    events = words.events()
    if is_given_up:
        events = [*events[:-3], *words.events_given_up()]
    stream = b"".join(events)
    watch, passed, begin = MessagesWatch(), b"", 0
    for size in [*cuts, len(stream)]:
        passed += watch.feed(stream[begin : begin + size])
        begin += size
    assert (passed == stream) is not is_given_up
    assert stream.startswith(passed)
    assert bool(watch.problem_at_end()) is is_given_up
    assert b"message_stop" in passed or is_given_up


@given(TEXTS)
def test_a_cut_stream_never_ends_well(tokens: list[str]) -> None:
    events = MessagesWords({}, tokens, "", None).events()
    for num_events in range(len(events) - 1):
        watch = MessagesWatch()
        watch.feed(b"".join(events[:num_events]))
        assert watch.problem_at_end()


@given(st.text())
def test_every_error_of_ours_survives_as_an_event(message: str) -> None:
    event = error_event(bad_request(message))
    assert first_event_end(event) == len(event)
    assert error_of(event) is not None
