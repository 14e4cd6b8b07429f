"""Anthropic's Messages API: the two bodies, and which answers are whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.messages import MessagesWords
from fakes.reservations import reservation_of
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_reservation, to_wire
from pdcluster_router.core.apis.anthropic_errors import error_body, error_event
from pdcluster_router.core.apis.client_apis import MESSAGES, OPENAI, api_of
from pdcluster_router.core.apis.messages import (
    MAX_CHOICE_BYTES,
    NO_REASON,
    MessagesWatch,
    first_event,
    parse_messages,
    unfinished,
)
from pdcluster_router.core.apis.openai_errors import ApiError, decode_lost, draining, no_engine, queue_full, wrong_key
from pdcluster_router.core.apis.rewrite import BadBody
from pdcluster_router.core.apis.sse import error_of, first_event_end

PARAMS = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)
RESERVATION = parse_reservation(reservation_of(to_wire(PARAMS)))
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
WORDS = MessagesWords(ASKED, ["Hello", ", world"], "", None)


def prefill_body(**fields: Any) -> dict[str, Any]:
    raw = json.dumps({**ASKED, **fields}).encode()
    body: dict[str, Any] = json.loads(b"".join(parse_messages(raw).for_prefill(RESERVATION)))
    return body


@pytest.mark.parametrize(
    ("path", "api"),
    [
        (b"/v1/messages", MESSAGES),
        (b"/v1/messages/count_tokens", MESSAGES),
        (b"/v1/messagesx", OPENAI),
        (b"/v1/completions", OPENAI),
        (b"", OPENAI),
    ],
)
def test_the_path_says_what_a_client_speaks(path: bytes, api: object) -> None:
    assert api_of(path) is api


# Bodies.


def test_prefill_makes_one_token_and_gets_no_key_that_only_openais_api_has() -> None:
    fields = {"stream": True, "system": "be kind", "thinking": {"type": "enabled", "budget_tokens": 2048}}
    body = prefill_body(**fields)
    assert parse_reservation(body.pop("kv_transfer_params")) == RESERVATION
    assert body == {**ASKED, **fields, "stream": False, "max_tokens": 1}


def test_decode_gets_the_clients_bytes_and_our_parameters() -> None:
    raw = b'{"max_tokens" : 9,\n"messages":[], "x": 1.10}'
    body = parse_messages(raw)
    assert b"".join(body.for_decode(None)) == raw
    assert b"".join(body.for_decode(PARAMS)).startswith(raw[:-1] + b',"kv_transfer_params":{')


@pytest.mark.parametrize("key", ["kv_transfer_params", "ec_transfer_params"])
def test_parameters_that_the_client_sent_never_win(key: str) -> None:
    assert prefill_body(**{key: {"remote_host": "evil"}})[key] in (None, json.loads(json.dumps(to_wire(RESERVATION))))
    with pytest.raises(BadBody, match="only this router writes it"):
        prefill_body(vllm_xargs={key: "{}"})


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "tool", "name": "f"}, {"type": "any"}),
        ({"name": "f", "type": "tool", "disable_parallel_tool_use": True}, {"type": "any"}),
        ({"type": "any"}, {"type": "any"}),
        ({"type": "auto"}, {"type": "auto"}),
        ({"type": "none"}, {"type": "none"}),
        (None, None),
        ("tool", "tool"),
        ({"type": 7}, {"type": 7}),
    ],
)
def test_prefill_is_not_held_to_one_named_tool(choice: object, told: object) -> None:
    assert prefill_body(tool_choice=choice)["tool_choice"] == told


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_tool_choice_is_no_longer_than_the_limit(num_more: int) -> None:
    choice = {"type": "tool", "name": ""}
    choice["name"] = "f" * (MAX_CHOICE_BYTES + num_more - len(json.dumps(choice)))
    if not num_more:
        assert prefill_body(tool_choice=choice)["tool_choice"] == {"type": "any"}
        return
    with pytest.raises(BadBody, match=f"tool_choice has {MAX_CHOICE_BYTES + 1} bytes, and {MAX_CHOICE_BYTES} are"):
        prefill_body(tool_choice=choice)


@pytest.mark.parametrize("key", ["n", "best_of", "echo", "prompt", "prompt_logprobs", "use_beam_search"])
def test_keys_of_openais_api_mean_nothing(key: str) -> None:
    body = parse_messages(json.dumps({**ASKED, key: 7, "max_completion_tokens": 77}).encode())
    assert not body.needs_local_prefill
    assert body.max_answer_tokens == 9


def test_an_image_counts_by_the_piece() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 300_000}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what is it"}]
    body = parse_messages(json.dumps({**ASKED, "messages": [{"role": "user", "content": content}]}).encode())
    assert 1000 <= body.estimated_prompt_tokens < 1100


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"null", b'{"tool_choice":}'])
def test_what_is_no_json_object_is_a_bad_body(raw: bytes) -> None:
    with pytest.raises(BadBody):
        parse_messages(raw)


@pytest.mark.parametrize("raw", [b'{"tool_choice":{"type":"\xff"}}', b'{"tool_choice":{"type":["\xff"]}}'])
def test_a_tool_choice_that_is_no_utf_8_is_the_engines_to_refuse(raw: bytes) -> None:
    assert bytes(parse_messages(raw).for_decode(None)[0]) + b"}" == raw


# Whole answers.


def test_an_answer_that_says_why_it_ended_is_whole() -> None:
    assert unfinished(WORDS.whole()) == unfinished(WORDS.one_token()) == ""
    assert unfinished(MessagesWords({"tools": [{}]}, ["a"], "", None).whole()) == ""


@pytest.mark.parametrize(
    "answer",
    [
        WORDS.whole_given_up(),
        b'{"stop_reason":"\xff"}',
        MessagesWords({"tools": [{}]}, ["a"], "", None).whole_given_up(),  # Its tool's input has a stop_reason.
        b'{"stop_reason":null}',
        b'{"stop_reason":7}',
        b'{"stop_reason":"end_turn","stop_reason":null}',
        b'{"content":[{"input":{"stop_reason":"end_turn"}}]}',
        b'{"content":' + b"[" * 100_000,
        WORDS.whole()[:-1],
        WORDS.whole() + b"}",
        b"[]",
        b"",
        b"x",
    ],
)
def test_an_answer_that_does_not_say_so_is_not(answer: bytes) -> None:
    assert unfinished(answer) == NO_REASON


# Streams.


def fed(stream: bytes, size: int) -> tuple[MessagesWatch, bytes]:
    watch, passed = MessagesWatch(), b""
    for start in range(0, len(stream), size):
        passed += watch.feed(stream[start : start + size])
    return watch, passed


WHOLE = b"".join(WORDS.events())
BEGUN = b"".join(WORDS.events()[:3])
STOPPED = BEGUN + WORDS.events_given_up()[0]
GIVEN_UP = BEGUN + b"".join(WORDS.events_given_up())
LATE = BEGUN + b"".join(WORDS.error_events("core died"))


@pytest.mark.parametrize("size", [*range(1, 80), len(WHOLE)])
def test_a_whole_stream_passes_and_is_whole_however_it_is_cut(size: int) -> None:
    watch, passed = fed(WHOLE, size)
    assert passed == WHOLE
    assert watch.message() is None
    assert watch.problem_at_end() == ""


@pytest.mark.parametrize("size", [*range(1, 80), len(GIVEN_UP)])
def test_a_stream_that_its_engine_gave_up_is_found_however_it_is_cut(size: int) -> None:
    watch, passed = fed(GIVEN_UP, size)
    assert watch.message() == NO_REASON
    assert passed.startswith(STOPPED)
    assert b'"stop_reason":null' not in passed[len(STOPPED) :]
    assert b"message_stop" not in passed
    assert watch.is_torn is (len(passed) > len(STOPPED))


@pytest.mark.parametrize("size", [*range(1, 80), len(LATE)])
def test_an_error_event_is_found_however_the_stream_is_cut(size: int) -> None:
    watch, passed = fed(LATE, size)
    assert watch.message() == "core died"
    assert passed.startswith(BEGUN)
    assert b"core died" not in passed


@pytest.mark.parametrize("num_events", range(1, len(WORDS.events()) - 1))
def test_a_stream_that_ends_before_it_says_why_is_not_whole(num_events: int) -> None:
    watch, passed = fed(b"".join(WORDS.events()[:num_events]), 50)
    assert passed == b"".join(WORDS.events()[:num_events])
    assert watch.problem_at_end() == "its stream ended without a stop_reason"


@pytest.mark.parametrize("cut", range(len(WHOLE)))
def test_a_stream_is_looked_at_as_far_as_the_event_after_its_beginning(cut: int) -> None:
    first, second = map(len, WORDS.events()[:2])
    begin, end = first_event(WHOLE[:cut])
    assert (begin, end) == (first if cut >= first else 0, first + second if cut >= first + second else -1)


def test_an_error_that_is_cut_off_behind_a_stop_reason_is_no_end() -> None:
    watch, _ = fed(WHOLE + WORDS.error_events("core died")[0][:30], 50)
    assert watch.message() is None
    assert watch.problem_at_end() == "an error that it did not finish"


def test_an_error_may_be_the_very_first_event() -> None:
    (error,) = WORDS.error_events("no KV")
    assert first_event(error) == (0, len(error))


def test_a_text_that_looks_like_an_end_or_an_error_is_neither() -> None:
    text = '\nevent: error\ndata: {"delta":{"stop_reason":"end_turn"}} {"delta":{"stop_reason":null}}'
    stream = b"".join(MessagesWords({}, [text], "", None).events()[:3])
    watch, passed = fed(stream, len(stream))
    assert passed == stream
    assert watch.message() is None
    assert watch.problem_at_end() == "its stream ended without a stop_reason"


# Errors.


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiError(400, "t", "c", "m"), "invalid_request_error"),
        (wrong_key(), "authentication_error"),
        (ApiError(404, "t", "c", "m"), "not_found_error"),
        (ApiError(405, "t", "c", "m"), "invalid_request_error"),
        (ApiError(413, "t", "c", "m"), "request_too_large"),
        (queue_full(1), "rate_limit_error"),
        (ApiError(500, "t", "c", "m"), "api_error"),
        (decode_lost("d", "gone"), "api_error"),
        (draining(), "overloaded_error"),
        (no_engine("decode", "gone"), "overloaded_error"),
        (ApiError(504, "t", "c", "m"), "timeout_error"),
    ],
)
def test_an_error_has_anthropics_shape_and_its_name_for_the_status(error: ApiError, kind: str) -> None:
    said = json.loads(error_body(error))
    assert said == {"type": "error", "error": {"type": kind, "message": error.message, "code": error.code}}


def test_our_own_error_event_is_read_as_an_error() -> None:
    event = error_event(decode_lost("http://d", "gone\n\n"))
    assert first_event_end(event) == len(event)
    assert error_of(event) is not None
    assert event.startswith(b'event: error\ndata: {"type":"error","error":{"type":"api_error",')
