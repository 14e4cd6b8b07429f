"""What a client saw is judged right: each kind of end, and every way in which a 200 can lie."""

from __future__ import annotations

import json
from typing import Final

import pytest

from campaign.outcomes import Observed, judge
from campaign.questions import Answer

RIGHT: Final = Answer((7, 8, 9), "a b c", "length")
ERROR: Final = '{"error": {"message": "no", "type": "server_error", "param": null, "code": "decode_lost"}}'


def choice(token_ids: tuple[int, ...], text: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"token_ids": list(token_ids), "text": text, "finish_reason": finish_reason}


def plain(token_ids: tuple[int, ...] = (7, 8, 9), text: str = "a b c", finish_reason: str = "length") -> Observed:
    reply = {"choices": [choice(token_ids, text, finish_reason)], "usage": {"completion_tokens": len(token_ids)}}
    return whole(json.dumps(reply))


def event(token_ids: tuple[int, ...], text: str, finish_reason: str | None = None) -> str:
    return json.dumps({"choices": [choice(token_ids, text, finish_reason)]})


def whole(body: str, status: int = 200) -> Observed:
    return Observed(status, body.encode(), is_whole=True)


def stream(*payloads: str, has_left: bool = False, is_hung: bool = False, is_whole: bool = False) -> Observed:
    body = "".join(f"data: {payload}\n\n" for payload in payloads).encode()
    return Observed(200, body, has_left=has_left, is_hung=is_hung, is_whole=is_whole)


def ended(*payloads: str) -> Observed:
    return stream(*payloads, is_whole=True)


FIRST, SECOND, OTHER = event((7, 8), "a b"), event((9,), " c", "length"), event((7, 1), "a x")
NO_MESSAGE = '{"error": {"message": "", "type": "server_error"}}'
PLAIN: Final = {
    "the right answer": ("ok", plain()),
    "another token": ("wrong", plain((7, 8, 1))),
    "short": ("wrong", plain((7, 8), "a b")),
    "another text": ("wrong", plain(text="other")),
    "another finish reason": ("wrong", plain(finish_reason="stop")),
    "an empty 200": ("wrong", whole("")),
    "no choices": ("wrong", whole("{}")),
    "no choice": ("wrong", whole('{"choices": []}')),
    "a 200 with an error": ("wrong", whole(ERROR)),
    "an error": ("error 502 decode_lost", whole(ERROR, 502)),
    "no JSON": ("unclear", whole("Bad Gateway", 502)),
    "no message": ("unclear", whole(NO_MESSAGE, 502)),
    "a cut error": ("unclear", Observed(502, ERROR.encode())),
    "blames the client": ("unclear", whole(ERROR, 400)),
    "no answer": ("unclear", Observed()),
    "no end": ("hung", Observed(is_hung=True)),
    "left": ("left", Observed(has_left=True)),
}
STREAM: Final = {
    "the right answer": ("ok", ended(FIRST, SECOND, "[DONE]")),
    "another token": ("wrong", ended(FIRST, event((1,), " c", "length"), "[DONE]")),
    "short": ("wrong", ended(FIRST, "[DONE]")),
    "no [DONE]": ("wrong", ended(FIRST, SECOND)),
    "error and [DONE]": ("wrong", ended(FIRST, ERROR, "[DONE]")),
    "a clean end after an error": ("wrong", ended(FIRST, ERROR)),
    "no event": ("wrong", ended(FIRST, "{}", SECOND, "[DONE]")),
    "empty": ("wrong", ended()),
    "an error and a cut": ("error 200 then decode_lost", stream(FIRST, ERROR)),
    "another token before an error": ("wrong", stream(OTHER, ERROR)),
    "another token before the client left": ("wrong", stream(OTHER, has_left=True)),
    "a cut without a word": ("unclear", stream(FIRST)),
    "left in the middle of an event": ("left", Observed(200, stream(FIRST, SECOND).body[:-5], has_left=True)),
}
ROUTER_LOST: Final = {
    "no answer": ("router lost", Observed()),
    "a cut": ("router lost", stream(FIRST)),
    "another token": ("wrong", ended(OTHER)),
    "no whole error": ("unclear", whole("Bad Gateway", 502)),
    "no end": ("hung", stream(FIRST, is_hung=True)),
}


@pytest.mark.parametrize(("expected", "observed"), PLAIN.values(), ids=PLAIN)
def test_an_answer_is_judged(expected: str, observed: Observed) -> None:
    assert verdict(observed, is_stream=False).startswith(expected)


@pytest.mark.parametrize(("expected", "observed"), STREAM.values(), ids=STREAM)
def test_a_stream_is_judged(expected: str, observed: Observed) -> None:
    assert verdict(observed, is_stream=True).startswith(expected)


@pytest.mark.parametrize(("expected", "observed"), ROUTER_LOST.values(), ids=ROUTER_LOST)
def test_a_router_that_we_killed_excuses_a_cut_and_nothing_else(expected: str, observed: Observed) -> None:
    assert verdict(observed, is_stream=True, is_router_lost=True).startswith(expected)


def verdict(observed: Observed, *, is_stream: bool, is_router_lost: bool = False) -> str:
    told = judge(RIGHT, observed, is_stream=is_stream, is_router_lost=is_router_lost)
    return f"{told.end.value} {told.code}"
