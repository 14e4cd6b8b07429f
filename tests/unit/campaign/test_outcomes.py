"""What a client saw is judged right: each kind of end, and every way in which a 200 can lie."""

from __future__ import annotations

import json

import pytest

from campaign.outcomes import End, Observed, judge
from campaign.questions import Answer

RIGHT = Answer((7, 8, 9), "a b c", "length")
ERROR = json.dumps({"error": {"message": "no", "type": "server_error", "param": None, "code": "decode_lost"}})


def plain(token_ids: tuple[int, ...] = (7, 8, 9), text: str = "a b c", finish_reason: str = "length") -> bytes:
    choice = {"token_ids": list(token_ids), "text": text, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": len(token_ids)}}).encode()


def event(token_ids: tuple[int, ...], text: str, finish_reason: str | None = None) -> str:
    choice = {"token_ids": list(token_ids), "text": text, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]})


def stream(*payloads: str) -> bytes:
    return "".join(f"data: {payload}\n\n" for payload in payloads).encode()


FIRST, SECOND = event((7, 8), "a b"), event((9,), " c", "length")


def verdict(observed: Observed, *, is_stream: bool = False, is_router_lost: bool = False) -> End:
    return judge(RIGHT, observed, is_stream=is_stream, is_router_lost=is_router_lost).end


def test_an_answer_equal_to_the_single_engines_is_ok() -> None:
    assert verdict(Observed(200, plain(), is_whole=True)) is End.OK
    assert verdict(Observed(200, stream(FIRST, SECOND, "[DONE]"), is_whole=True), is_stream=True) is End.OK


@pytest.mark.parametrize(
    "body",
    [plain((7, 8, 1)), plain((7, 8), "a b"), plain(text="other"), plain(finish_reason="stop"), b"", b"{}",
     ERROR.encode(), b'{"choices": []}'],
    ids=["token", "short", "text", "finish reason", "empty", "no choices", "an error", "no choice"],
)  # fmt: skip
def test_a_whole_200_that_is_not_the_right_answer_is_wrong(body: bytes) -> None:
    assert verdict(Observed(200, body, is_whole=True)) is End.WRONG


@pytest.mark.parametrize(
    "body",
    [
        stream(FIRST, event((1,), " c", "length"), "[DONE]"),
        stream(FIRST, "[DONE]"),
        stream(FIRST, SECOND),
        stream(FIRST, ERROR, "[DONE]"),
        stream(FIRST, ERROR),
        stream(FIRST, "{}", SECOND, "[DONE]"),
        b"",
    ],
    ids=["token", "short", "no [DONE]", "error and [DONE]", "a clean end after an error", "no event", "empty"],
)
def test_a_stream_that_ends_cleanly_and_is_not_the_right_answer_is_wrong(body: bytes) -> None:
    assert verdict(Observed(200, body, is_whole=True), is_stream=True) is End.WRONG


def test_a_stream_that_ends_in_an_error_event_and_a_cut_is_an_error_with_its_code() -> None:
    told = judge(RIGHT, Observed(200, stream(FIRST, ERROR)), is_stream=True, is_router_lost=False)
    assert (told.end, told.code) == (End.ERROR, "200 then decode_lost")


def test_a_stream_that_is_cut_without_a_word_is_unclear() -> None:
    assert verdict(Observed(200, stream(FIRST)), is_stream=True) is End.UNCLEAR


@pytest.mark.parametrize("left", [True, False])
def test_tokens_before_a_cut_or_a_leave_must_be_the_beginning_of_the_answer(left: bool) -> None:
    wrong = Observed(200, stream(event((7, 1), "a x"), ERROR), has_left=left)
    assert verdict(wrong, is_stream=True) is End.WRONG


def test_an_openai_error_is_an_error_with_status_and_code() -> None:
    told = judge(RIGHT, Observed(502, ERROR.encode(), is_whole=True), is_stream=True, is_router_lost=False)
    assert (told.end, told.code) == (End.ERROR, "502 decode_lost")


@pytest.mark.parametrize(
    "observed",
    [
        Observed(502, b"Bad Gateway", is_whole=True),
        Observed(502, b'{"error": {"message": "", "type": "server_error"}}', is_whole=True),
        Observed(502, ERROR.encode(), is_whole=False),
        Observed(400, ERROR.encode(), is_whole=True),
        Observed(None),
    ],
    ids=["no JSON", "no message", "cut", "blames the client", "no answer at all"],
)
def test_an_end_that_tells_a_correct_client_nothing_is_unclear(observed: Observed) -> None:
    assert verdict(observed) is End.UNCLEAR


def test_an_answer_that_does_not_end_is_hung_also_when_the_router_was_lost() -> None:
    assert verdict(Observed(is_hung=True)) is End.HUNG
    assert verdict(Observed(200, stream(FIRST), is_hung=True), is_stream=True, is_router_lost=True) is End.HUNG


def test_a_client_that_left_has_left() -> None:
    assert verdict(Observed(has_left=True)) is End.LEFT
    assert verdict(Observed(200, stream(FIRST)[:-5], has_left=True), is_stream=True) is End.LEFT


def test_a_cut_is_excused_by_a_router_that_we_killed_but_a_lie_is_not() -> None:
    assert verdict(Observed(None), is_router_lost=True) is End.ROUTER_LOST
    assert verdict(Observed(200, stream(FIRST)), is_stream=True, is_router_lost=True) is End.ROUTER_LOST
    assert verdict(Observed(200, plain((1,)), is_whole=True), is_router_lost=True) is End.WRONG
    assert verdict(Observed(502, b"Bad Gateway", is_whole=True), is_router_lost=True) is End.UNCLEAR
