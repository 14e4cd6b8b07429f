"""Server-sent events: where the first ends, and whether it is an error."""

from __future__ import annotations

import pytest

from pdcluster_router.core.apis.openai_errors import decode_lost
from pdcluster_router.core.apis.sse import (
    GAVE_UP,
    KEPT_BYTES,
    MAX_ERROR_EVENT_BYTES,
    ErrorWatch,
    error_event,
    error_of,
    first_event_end,
    given_up_in,
)
from pdcluster_router.core.telemetry.answer_facts import token_counts_in


@pytest.mark.parametrize(
    ("stream", "end"),
    [
        (b"", -1),
        (b"data: 1\n", -1),
        (b"data: 1\n\n", 9),
        (b"data: 1\n\ndata: 2\n\n", 9),
        (b"data: 1\r\n\r\ndata: 2\n\n", 11),
        (b"data: 1\r\r", 9),
        (b": ping\n\ndata: 1\n\n", 17),
        (b": ping\n\ndata: 1\n", -1),
        (b": ping\n\n:\r\n\r\n", -1),
    ],
)
def test_the_first_event_ends_at_its_blank_line(stream: bytes, end: int) -> None:
    assert first_event_end(stream) == end


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error": {"message": "no", "code": 400}}\n\n', 400),
        (b'data:{"error":{"message":"no","code":503}}\r\n\r\n', 503),
        (b'event: error\ndata: {"error": {"message": "no"}}\n\n', 500),
        (b'data: {"error": {"message": "no", "code": "x"}}\n\n', 500),
        (b'data: {"error": {"message": "no", "code": 200}}\n\n', 500),
        (b'data: {"error":\ndata: {"code": 404}}\n\n', 404),
        (b'data: {"choices": [{"text": "\\"error\\""}]}\n\n', None),
        (b'data: {"choices": [], "error": null}\n\n', None),
        (b'data: "error"\n\n', None),
        (b'data: {"error"\n\n', None),
        (b"data: [DONE]\n\n", None),
    ],
)
def test_only_an_error_object_is_an_error(event: bytes, status: int | None) -> None:
    error = error_of(event)
    assert (None if error is None else error.status) == status


def test_our_own_error_event_is_read_as_an_error() -> None:
    error = error_of(error_event(decode_lost("http://d", "gone")))
    assert error is not None
    assert b"gone" in error.body


LATE = b'data: {"a": 1}\n\ndata: {"error": {"message": "core died", "code": 500}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", range(1, len(LATE) + 1))
def test_an_error_event_is_found_however_the_stream_is_cut_into_chunks(size: int) -> None:
    watch, passed = ErrorWatch(), b""
    for start in range(0, len(LATE), size):
        passed += watch.feed(LATE[start : start + size])
    assert watch.message() == "core died"
    assert passed.startswith(b'data: {"a": 1}\n\n')
    assert LATE.index(b'{"error"') + len(b'{"error') >= len(passed)


GIVEN_UP = (
    b'data: {"choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", range(1, len(GIVEN_UP) + 1))
def test_an_event_that_gives_up_is_found_however_the_stream_is_cut_into_chunks(size: int) -> None:
    watch, passed = ErrorWatch(), b""
    for start in range(0, len(GIVEN_UP), size):
        passed += watch.feed(GIVEN_UP[start : start + size])
    assert watch.message() in GAVE_UP.values()
    assert passed.startswith(GIVEN_UP[: GIVEN_UP.index(b"\n\n") + 2])
    assert b'"abort"' not in passed
    assert watch.is_torn is (len(passed) > GIVEN_UP.index(b"\n\n") + 2)


@pytest.mark.parametrize("size", [1, 7, 200, 5000, 90_000])
def test_the_end_of_a_stream_is_kept_and_little_more(size: int) -> None:
    watch, stream = ErrorWatch(), b"".join(b'data: {"n": %d}\n\n' % number for number in range(4000))
    for start in range(0, len(stream), size):
        chunk = stream[start : start + size]
        assert watch.feed(chunk) is chunk
        assert len(watch.end) <= 2 * KEPT_BYTES
    assert watch.end.endswith(stream[-KEPT_BYTES:])


def test_what_is_kept_of_an_end_has_the_usage_of_vllms_longest_last_events() -> None:
    chunk = b'data: {"id":"chatcmpl-%b","choices":[],"usage":%b,"system_fingerprint":null}\n\ndata: [DONE]\n\n'
    details = (
        b'"prompt_tokens_details":{"audio_tokens":null,"cached_tokens":123456789},"completion_tokens_details":null'
    )
    usage = b'{"prompt_tokens":123456789,"total_tokens":123456789,"completion_tokens":123456789,%b}' % details
    watch = ErrorWatch()
    watch.feed(b"x" * 2 * KEPT_BYTES)
    watch.feed(chunk % (b"f" * 32, usage))
    watch.feed(b"")
    assert token_counts_in(watch.end[-KEPT_BYTES:]).output_tokens == 123456789


def test_a_text_about_a_request_that_is_given_up_is_passed_on() -> None:
    watch = ErrorWatch()
    event = b'data: {"text":"\\"finish_reason\\":\\"abort\\""}\n\n'
    assert watch.feed(event) == event
    assert watch.message() is None
    assert not given_up_in(event)


def test_a_text_that_looks_like_an_error_is_passed_on() -> None:
    watch = ErrorWatch()
    event = b'data: {"text": "data: {\\"error\\": 1}"}\n\n'
    assert watch.feed(event) == event
    assert not watch.has_error


def test_an_error_event_that_never_ends_takes_a_bounded_room() -> None:
    watch = ErrorWatch()
    for chunk in [b'data: {"error": {"message": "'] + [b"x" * (MAX_ERROR_EVENT_BYTES // 4)] * 9:
        assert watch.feed(chunk) == b""
    assert len(watch._event or b"") < 1.5 * MAX_ERROR_EVENT_BYTES
    assert (watch.has_error, watch.message()) == (True, "an error of more than 1048576 bytes")


def test_half_an_error_event_is_an_error_without_a_message_yet() -> None:
    watch = ErrorWatch()
    assert watch.feed(b'data: {"error": {"mess') == b""
    assert watch.has_error
    assert watch.message() is None


@pytest.mark.parametrize(("answer", "why"), [(b"..b..a", "B"), (b"..a..b", "A"), (b"a", "A"), (b"...", "")])
def test_of_two_marks_the_first_one_says_why(answer: bytes, why: str) -> None:
    assert given_up_in(answer, {b"a": "A", b"b": "B"}) == why
