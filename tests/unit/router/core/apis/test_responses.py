"""OpenAI's Responses API: the two bodies, which requests are refused, and which answers are whole."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fakes.reservations import reservation_of
from fakes.responses import ResponsesWords
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_decode_params, parse_reservation, to_wire
from pdcluster_router.core.apis.client_apis import OPENAI, RESPONSES, api_of
from pdcluster_router.core.apis.messages import MAX_ANSWER_BYTES
from pdcluster_router.core.apis.openai_errors import ApiError, decode_lost, draining
from pdcluster_router.core.apis.responses import NOT_WHOLE, SEVERAL_TURNS, parse_responses, unfinished
from pdcluster_router.core.apis.responses_stream import ResponsesWatch, error_event, first_event, gives_up
from pdcluster_router.core.apis.rewrite import ABSENT, BadBody

PARAMS = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)
RESERVATION = parse_reservation(reservation_of(to_wire(PARAMS)))
ITEMS = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
ASKED: dict[str, Any] = {"model": "m", "max_output_tokens": 9, "input": ITEMS}
WORDS = ResponsesWords({"kv_transfer_params": {"wants_whole": True}}, ["Hello", ", world"], "", None)


def raw_of(**fields: Any) -> bytes:
    return json.dumps({**ASKED, **fields}).encode()


def decode_body(params: DecodeParams | bytes | None, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(b"".join(parse_responses(raw_of(**fields)).for_decode(params)))
    return body


def prefill_body(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(b"".join(parse_responses(raw_of(**fields)).for_prefill(RESERVATION)))
    return body


@pytest.mark.parametrize(
    ("path", "api"),
    [(b"/v1/responses", RESPONSES), (b"/v1/responses/resp_1", OPENAI), (b"/v1/responsesx", OPENAI)],
)
def test_the_path_says_what_a_client_speaks(path: bytes, api: object) -> None:
    assert api_of(path) is api


# Bodies.


def test_prefill_makes_one_token_of_the_same_prompt() -> None:
    fields = {"stream": True, "instructions": "be kind", "tools": [{"type": "function", "name": "f"}], "store": True}
    body = prefill_body(**fields)
    assert parse_reservation(body.pop("kv_transfer_params")) == msgspec.structs.replace(RESERVATION, wants_whole=True)
    assert body == {**ASKED, **fields, "store": False, "stream": False, "max_output_tokens": 1}


def test_prefill_gets_no_encoders_parameters() -> None:
    assert prefill_body(ec_transfer_params={"a": 1})["ec_transfer_params"] is None


def test_decode_is_asked_to_say_whether_its_answer_is_whole() -> None:
    body = decode_body(PARAMS, stream=True)
    assert parse_decode_params(body.pop("kv_transfer_params")) == msgspec.structs.replace(PARAMS, wants_whole=True)
    assert body == {**ASKED, "stream": True, "store": False}


def test_decode_alone_is_asked_too_and_takes_part_in_no_transfer() -> None:
    assert decode_body(None, kv_transfer_params={"do_remote_prefill": True})["kv_transfer_params"] == {
        "wants_whole": True
    }


def test_another_dialects_parameters_stay_as_they_are() -> None:
    assert decode_body(b'{"a":1}')["kv_transfer_params"] == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"include": None, "top_logprobs": 0}),
        ({"enable_response_messages": True}, {"enable_response_messages": False}),
        ({"metadata": {"a": "b"}}, {"metadata": None}),
    ],
)
def test_prefills_answer_has_nothing_that_only_the_clients_needs(
    fields: dict[str, object], told: dict[str, object]
) -> None:
    assert prefill_body(**fields).items() >= told.items()
    assert decode_body(PARAMS, **fields).items() >= fields.items()


@pytest.mark.parametrize("value", ["auto", "AUTO", 7])
def test_decode_itself_prefills_a_prompt_that_vllm_may_cut(value: object) -> None:
    body = parse_responses(raw_of(truncation=value))
    assert (body.needs_local_prefill, body.wants_decode_alone) == (True, True)


@pytest.mark.parametrize("value", ["disabled", None])
def test_a_prompt_that_stays_whole_is_pushed(value: object) -> None:
    assert not parse_responses(raw_of(truncation=value)).needs_local_prefill


def test_what_the_router_must_know_of_a_request() -> None:
    body = parse_responses(raw_of(stream="true", prompt_cache_key="k", n=3))
    assert (body.is_stream, body.needs_local_prefill, body.max_answer_tokens, body.model) == (True, False, 9, "m")
    assert body.prompt_cache_key == b'"k"'
    assert json.loads(bytes(body.messages)) == ITEMS
    assert body.prompt is ABSENT


def test_a_text_as_input_is_a_prompt() -> None:
    body = parse_responses(raw_of(input="once upon a time"))
    assert (bytes(body.prompt), body.messages) == (b'"once upon a time"', ABSENT)


def test_an_image_counts_by_the_piece() -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{'A' * 300_000}"}
    assert 1000 <= parse_responses(raw_of(input=[{"role": "user", "content": [image]}])).estimated_prompt_tokens < 1100


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": None},
        {"background": None},
        {"background": False},
        {"stop": None},
        {"stop": []},
        {"stop": ""},
        {"tools": None},
        {"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}, {"type": "web_search"}]},
    ],
)
def test_values_that_ask_for_nothing_are_served(fields: dict[str, Any]) -> None:
    assert {**decode_body(None, **fields), **ASKED} == {
        **ASKED, **fields, "store": False, "kv_transfer_params": {"wants_whole": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is set"),
        ({"background": True}, "background is set"),
        ({"background": "true"}, "background is set"),
        ({"stop": "e"}, "stop is set"),
        ({"metadata": {"a": "x" * (64 << 10)}}, "metadata has more than 65536 bytes"),
        ({"stop": ["e"]}, "stop is set"),
        *(
            ({"tools": [{"type": "function"}, {"type": kind}]}, f"a tool has type {kind}")
            for kind in ("code_interpreter", "container", "mcp", "web_search_preview")
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadBody, match=told):
        parse_responses(raw_of(**fields))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"null", b'{"tools":7}', b'{"tools":[7]}', b'{"input":}'])
def test_what_vllm_would_not_take_either_is_a_bad_body(raw: bytes) -> None:
    with pytest.raises(BadBody):
        parse_responses(raw)


# Whole answers.


def test_an_answer_that_says_so_is_whole() -> None:
    assert unfinished(WORDS.whole()) == unfinished(WORDS.one_token()) == ""
    proven = ResponsesWords(WORDS.body, ["a"], "", {"pdcluster_received_tokens": 7})
    assert unfinished(proven.whole()) == ""


@pytest.mark.parametrize(
    "answer",
    [
        WORDS.whole_given_up(),
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":{"pdcluster_is_whole":false}}',
        b'{"kv_transfer_params":{"pdcluster_is_whole":"true"}}',
        b'{"kv_transfer_params":{"pdcluster_is_whole":true},"kv_transfer_params":null}',
        b'{"output":[{"kv_transfer_params":{"pdcluster_is_whole":true}}]}',
        b'{"output":' + b"[" * 100_000,
        WORDS.whole()[:-1],
        WORDS.whole() + b"}",
        b"[]",
        b"",
        b"x",
        b'{"kv_transfer_params":{"pdcluster_is_whole":true},"model":"\xff"',
    ],
)
def test_an_answer_that_does_not_say_so_is_not(answer: bytes) -> None:
    assert unfinished(answer) == NOT_WHOLE


def with_turns(answer: bytes, num_turns: int) -> bytes:
    return answer.replace(b'"input_tokens_per_turn":[]', b'"input_tokens_per_turn":%b' % str([7] * num_turns).encode())


def test_the_word_of_one_turn_says_nothing_of_the_next() -> None:
    """vLLM keeps the parameters of the last turn that had some."""
    assert unfinished(with_turns(WORDS.whole(), 1)) == ""
    assert unfinished(with_turns(WORDS.whole(), 2)) == SEVERAL_TURNS


# Streams.


def fed(stream: bytes, size: int) -> tuple[ResponsesWatch, bytes]:
    watch, passed = ResponsesWatch(), b""
    for start in range(0, len(stream), size):
        passed += watch.feed(stream[start : start + size])
    return watch, passed


WHOLE = b"".join(WORDS.events())
BEGUN = b"".join(WORDS.events()[:-1])
GIVEN_UP = BEGUN + b"".join(WORDS.events_given_up())
LATE = BEGUN + b"".join(WORDS.error_events("core died"))
LAST_LINE = b"event: response.completed\n"
SIZES = (*range(1, 30), 64, 1 << 20)


@pytest.mark.parametrize("stream", [WHOLE, BEGUN + b"".join(WORDS.last("response.incomplete", "incomplete"))])
@pytest.mark.parametrize("size", SIZES)
def test_a_whole_stream_passes_and_is_whole_however_it_is_cut(stream: bytes, size: int) -> None:
    watch, passed = fed(stream, size)
    assert passed == stream
    assert watch.message() is None
    assert watch.problem_at_end() == ""
    assert watch.is_between_events
    assert not watch.is_torn


@pytest.mark.parametrize("size", SIZES)
def test_the_last_event_of_a_stream_that_its_engine_gave_up_is_held_back_however_it_is_cut(size: int) -> None:
    watch, passed = fed(GIVEN_UP, size)
    assert watch.message() == watch.problem_at_end() == NOT_WHOLE
    assert passed.startswith(BEGUN)
    assert LAST_LINE.startswith(passed[len(BEGUN) :])
    assert passed != BEGUN + LAST_LINE
    assert watch.is_torn is (passed != BEGUN)


def test_the_last_event_of_several_turns_is_held_back() -> None:
    last = with_turns(WORDS.events()[-1], 2)
    watch, passed = fed(BEGUN + last, 99)
    assert (watch.message(), passed) == (SEVERAL_TURNS, BEGUN)
    assert gives_up(last) == SEVERAL_TURNS


@pytest.mark.parametrize("size", SIZES)
def test_an_error_event_is_found_however_the_stream_is_cut(size: int) -> None:
    watch, passed = fed(LATE, size)
    assert watch.message() == "core died"
    assert passed.startswith(BEGUN)
    assert b"error" not in passed[len(BEGUN) + len("event: e") :]


def test_a_stream_that_ends_before_its_last_event_has_is_not_whole() -> None:
    for length in range(len(BEGUN), len(WHOLE)):
        watch, _ = fed(WHOLE[:length], 7)
        assert watch.problem_at_end(), length
        assert not watch.is_between_events or length == len(BEGUN)


def test_a_last_event_without_an_end_is_not_kept_without_end() -> None:
    watch = ResponsesWatch()
    watch.feed(BEGUN + LAST_LINE + b"data: ")
    piece = b"x" * (1 << 20)
    for _ in range(MAX_ANSWER_BYTES >> 20):
        assert watch.message() is None
        assert watch.feed(piece) == b""
    assert "longer than" in str(watch.message())


def test_a_stream_at_whose_beginning_is_its_last_event_is_judged_too() -> None:
    last = b"".join(WORDS.last("response.completed", "completed"))
    assert fed(last, len(last))[1] == last
    assert fed(b"".join(WORDS.events_given_up()), 9)[0].message() == NOT_WHOLE


@pytest.mark.parametrize("num_early", [0, 1, 2])
def test_the_event_behind_the_early_ones_may_be_an_error(num_early: int) -> None:
    early = b"".join(WORDS.events()[:num_early])
    event = WORDS.error_events("no KV")[0]
    assert first_event(early + event + b"data: ") == (len(early), len(early + event))
    assert first_event(early + event[:-1]) == (len(early), -1)
    assert first_event(early)[1] == -1


def test_only_a_last_event_that_is_not_whole_gives_the_request_up() -> None:
    assert gives_up(WORDS.events_given_up()[0]) == NOT_WHOLE
    assert [gives_up(event) for event in (*WORDS.events(), b"", b"data: {}\n\n")] == [""] * (len(WORDS.events()) + 2)


# Errors.


@pytest.mark.parametrize("error", [draining(), decode_lost("decode-0", "reset")])
def test_an_error_event_is_one_of_the_api_and_has_what_sdks_look_for(error: ApiError) -> None:
    name, data, *rest = error_event(error).split(b"\n")
    told = json.loads(data.removeprefix(b"data: "))
    assert (name, rest) == (b"event: error", [b"", b""])
    assert (told["type"], told["code"], told["message"]) == ("error", error.code, error.message)
    assert told["error"] == json.loads(error.body())["error"]
