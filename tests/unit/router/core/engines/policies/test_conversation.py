"""Which requests belong together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.pictures import data_url, png
from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.core.engines.policies.conversation import LEAST_BYTES, OPENING_BYTES, SESSION_HEADERS, number_of

HELLO = [{"role": "system", "content": "You help. " * 200}, {"role": "user", "content": "What is KV?"}]
REST = [{"role": "assistant", "content": "A cache."}, {"role": "user", "content": "Of what?"}]


def number(body: dict[str, Any] | str, *lines: str) -> int | None:
    raw = body if isinstance(body, str) else json.dumps(body)
    headers = b"".join(f"{line}\r\n".encode() for line in ("content-type: application/json", *lines))
    return number_of(RequestFacts(b"/v1/chat/completions", headers, parse_body(raw.encode()), ""))


def content_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"content": message["content"], "role": message["role"]} for message in messages]


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def with_name(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": message["role"], "name": "n", "content": message["content"]} for message in messages]


@pytest.mark.parametrize("header", sorted(name.decode() for name in SESSION_HEADERS))
def test_a_header_that_names_a_session_is_all_that_counts(header: str) -> None:
    lines = ("x-claude-code-session-id: s",) if header in ("x-claude-code-agent-id", "thread-id") else ()
    of_one = number({"messages": HELLO}, *lines, f"{header}: one")
    assert of_one is not None
    assert number({"prompt": "quite another"}, *lines, f"{header}: one") == of_one
    assert number({"messages": HELLO}, *lines, f"{header}: two") != of_one


@pytest.mark.parametrize("line", ["x-my-session-id: one", "x-session-id: ", f"x-session-id: {'1' * 600}", "session: a"])
def test_a_header_that_names_none_does_not_count(line: str) -> None:
    assert number({"messages": HELLO}, line) == number({"messages": HELLO})


def test_vllms_own_field_names_a_session_too() -> None:
    of_one = number({"messages": HELLO, "session_id": "one"})
    assert number({"messages": REST, "session_id": "one"}) == of_one
    assert number({"messages": HELLO, "session_id": "two"}) != of_one
    assert number({"messages": HELLO, "session_id": ""}) == number({"messages": HELLO})
    assert number({"messages": HELLO, "session_id": 7}) == number({"messages": HELLO})
    assert number({"messages": HELLO, "session_id": "one"}, "x-session-id: of a gateway") == of_one


@pytest.mark.parametrize("form", [list, content_first, in_parts, with_name])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_conversation_keeps_its_number_while_it_grows(form: Any, separators: tuple[str, str]) -> None:
    short, long = ({"messages": form(messages), "stream": True} for messages in (HELLO, HELLO + REST * 9))
    first = number(json.dumps(short, separators=separators))
    assert first is not None
    assert number(json.dumps(long, separators=separators)) == first


@pytest.mark.parametrize("form", [list, content_first, in_parts])
def test_conversations_with_one_system_prompt_are_told_apart(form: Any) -> None:
    other = [HELLO[0], {"role": "user", "content": "What is KW?"}]
    assert number({"messages": form(other + REST)}) != number({"messages": form(HELLO + REST)})


def test_the_end_of_a_long_system_prompt_does_not_tell_conversations_apart() -> None:
    """As a date in it: at most 1 KiB before the user's first message is looked at."""
    asked = [[{"role": "system", "content": "You help. " * 200 + day}, HELLO[1]] for day in ("Monday", "Tuesday")]
    assert number({"messages": asked[0]}) == number({"messages": asked[1]}) is not None


def test_a_message_that_quotes_a_role_or_a_quote_is_a_message() -> None:
    tricky = 'He said "no" and \\"role\\": \\"user\\", \\\\" too, \\'
    one, two = ([HELLO[0], {"role": "user", "content": tricky + end}] for end in ("one", "two"))
    assert number({"messages": one + REST}) == number({"messages": one})
    assert number({"messages": one}) != number({"messages": two})


def test_questions_about_one_long_document_belong_together() -> None:
    asked = [[HELLO[0], {"role": "user", "content": "x" * OPENING_BYTES + end}] for end in ("Why?", "When?")]
    assert number({"messages": asked[0]}) == number({"messages": asked[1]})


def test_a_key_for_the_cache_refines_the_opening_as_it_does_with_openai() -> None:
    said = [number({"messages": messages, "prompt_cache_key": key}) for messages in (HELLO, REST * 99) for key in "ab"]
    assert len({*said, number({"messages": HELLO})}) == 5
    assert number({"messages": HELLO + REST, "prompt_cache_key": "a"}) == said[0]
    assert number({"prompt_cache_key": "a", "input": "what Codex sends has no messages"}) is not None


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_who_asks_says_nothing_of_the_conversation(field: str) -> None:
    assert number({"messages": HELLO, field: "u"}) == number({"messages": HELLO})


@pytest.mark.parametrize(
    "body", [{"messages": [HELLO[1]]}, {"prompt": "x" * (LEAST_BYTES - 3)}, {}, {"messages": None}]
)
def test_what_is_short_is_not_worth_to_come_back_for(body: dict[str, Any]) -> None:
    assert number(body) is None


def test_a_prompt_is_known_by_how_it_begins() -> None:
    begin = number({"prompt": "x" * LEAST_BYTES})
    assert begin is not None
    assert number({"prompt": "x" * LEAST_BYTES + "y" * 99}) == begin
    assert number({"prompt": "y" + "x" * LEAST_BYTES}) != begin
    longer = number({"prompt": "x" * OPENING_BYTES})
    assert number({"prompt": "x" * OPENING_BYTES + "y" * 99}) == longer
    assert number({"prompt": [1] * OPENING_BYTES}) == number({"prompt": [1] * OPENING_BYTES + [2]})


@pytest.mark.parametrize("messages", ['"text"', "{}", "7", "[[]]", '[{"role":"user"'])
def test_messages_that_are_none_have_some_number_or_no_body(messages: str) -> None:
    raw = f'{{"pad":"{"x" * 2000}","messages":{messages}}}'
    if messages.startswith("[{"):
        raw = '{"messages":[{"role":"user","x":"' + "x" * 2000 + '"}]}'
        assert number(raw) is not None
    else:
        assert number(raw) is None


def test_questions_about_one_image_belong_together_and_those_about_another_one_do_not() -> None:
    first, other = (data_url(png(64, 64, seed)) for seed in (1, 2))
    assert len(first) > OPENING_BYTES

    def about(url: str, question: str) -> int | None:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        return number({"messages": [{"role": "user", "content": parts}]})

    assert about(first, "What is it?") == about(first, "Who drew it?")
    assert about(first, "What is it?") != about(other, "What is it?")
