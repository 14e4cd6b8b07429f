"""How one request ended, judged from the bytes that its client saw. Pure.

    200, whole, equal to the single engine's answer              OK
    an OpenAI error with status 429 or 5xx                       ERROR
    200, a stream that ends in an error event and is then cut    ERROR
    the client left                                              LEFT
    cut while the router was killed or being restarted           ROUTER_LOST
    no end by deadline and margin                                HUNG      must not be
    other tokens, short, an error or nothing in a whole 200      WRONG     must not be
    any other end: cut without a word, an error nobody can read  UNCLEAR   must not be

Tokens of a stream that was left or cut must be the beginning of the right answer: else it is WRONG too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from campaign.questions import Answer

_DONE: Final = "[DONE]"


class End(Enum):
    """The kinds of an end; the table above says when."""

    OK = "ok"
    ERROR = "error"
    LEFT = "left"
    ROUTER_LOST = "router lost"
    HUNG = "hung"
    WRONG = "wrong"
    UNCLEAR = "unclear"


@dataclass(slots=True)
class Observed:
    """What a client saw of one answer. Filled by the client as it reads."""

    status: int | None = None
    """None: no head of an answer came."""
    body: bytes = b""
    is_whole: bool = False
    """The answer ended as its head said it would."""
    has_left: bool = False
    is_hung: bool = False
    cut: str = ""
    """What the socket said when the answer was cut."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``code``: status and error code, for counting. ``detail``: for whoever looks for the cause."""

    end: End
    code: str = ""
    detail: str = ""


def judge(expected: Answer, observed: Observed, *, is_stream: bool, is_router_lost: bool) -> Verdict:
    """The verdict. ``is_router_lost``: the router was killed or away during the request, by us."""
    if observed.status is not None and observed.status != 200:
        verdict = _judge_error(observed)
    elif is_stream:
        verdict = _judge_stream(expected, observed)
    else:
        verdict = _judge_plain(expected, observed)
    if observed.is_hung and verdict.end is not End.WRONG:
        return Verdict(End.HUNG, detail=f"status {observed.status}, {len(observed.body)} bytes came")
    if observed.has_left and verdict.end is End.UNCLEAR:
        return Verdict(End.LEFT)
    if is_router_lost and verdict.end is End.UNCLEAR and not observed.is_whole:
        return Verdict(End.ROUTER_LOST, detail=verdict.detail)
    return verdict


def _judge_error(observed: Observed) -> Verdict:
    status, code = observed.status or 0, _error_code(_parsed(observed.body))
    if not observed.is_whole or code is None:
        return Verdict(End.UNCLEAR, str(status), f"no whole OpenAI error: {_quoted(observed.body)}")
    if status != 429 and status < 500:
        return Verdict(End.UNCLEAR, f"{status} {code}", f"blames a correct client: {_quoted(observed.body)}")
    return Verdict(End.ERROR, f"{status} {code}", _quoted(observed.body))


def _judge_plain(expected: Answer, observed: Observed) -> Verdict:
    if not observed.is_whole:
        return _cut(observed)
    reply = _parsed(observed.body)
    try:
        choice = reply["choices"][0]
        got = Answer(tuple(choice["token_ids"]), choice["text"], choice["finish_reason"])
        num_tokens = reply["usage"]["completion_tokens"]
    except (KeyError, IndexError, TypeError):
        return Verdict(End.WRONG, detail=f"a 200 without an answer: {_quoted(observed.body)}")
    if got != expected or num_tokens != len(expected.token_ids):
        return Verdict(End.WRONG, detail=_difference(expected, got))
    return Verdict(End.OK)


def _judge_stream(expected: Answer, observed: Observed) -> Verdict:
    payloads = _payloads(observed.body)
    events = [_parsed(payload.encode()) for payload in payloads if payload != _DONE]
    errors = [code for event in events if (code := _error_code(event)) is not None]
    got = _joined(events)
    if got is None or not _is_beginning(got, expected):
        return Verdict(End.WRONG, detail=_difference(expected, got))
    if not observed.is_whole:
        return Verdict(End.ERROR, f"200 then {errors[-1]}", payloads[-1]) if errors else _cut(observed)
    if errors or not payloads or payloads[-1] != _DONE or got != expected:
        return Verdict(End.WRONG, detail=f"a clean end of {_difference(expected, got)}, errors {errors}")
    return Verdict(End.OK)


def _cut(observed: Observed) -> Verdict:
    detail = f"cut after {len(observed.body)} bytes of status {observed.status}: {observed.cut or 'closed'}"
    return Verdict(End.UNCLEAR, "cut", detail)


def _payloads(body: bytes) -> list[str]:
    """The whole events of a stream; what follows the last blank line was cut."""
    blocks = body.decode("utf-8", "replace").split("\n\n")[:-1]
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


def _joined(events: list[Any]) -> Answer | None:
    """All events but errors as one answer; None when one cannot be read."""
    tokens: list[int] = []
    text, finish_reason = "", ""
    try:
        for event in events:
            if _error_code(event) is not None:
                continue
            for choice in event["choices"]:
                tokens += choice["token_ids"] or ()
                text += choice["text"]
                finish_reason = choice["finish_reason"] or finish_reason
    except (KeyError, TypeError):
        return None
    return Answer(tuple(tokens), text, finish_reason)


def _is_beginning(got: Answer, expected: Answer) -> bool:
    same_tokens = expected.token_ids[: len(got.token_ids)] == got.token_ids
    return same_tokens and expected.text.startswith(got.text) and got.finish_reason in ("", expected.finish_reason)


def _error_code(reply: Any) -> str | None:
    """The code of an OpenAI-shaped error with a message; None for anything else."""
    error = reply.get("error") if isinstance(reply, dict) else None
    if not isinstance(error, dict) or not error.get("message") or "type" not in error:
        return None
    return str(error.get("code"))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _difference(expected: Answer, got: Answer | None) -> str:
    if got is None:
        return "an event that cannot be read"
    return (
        f"{list(got.token_ids)} {got.finish_reason!r}, expected {list(expected.token_ids)} {expected.finish_reason!r}"
    )


def _quoted(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace")
