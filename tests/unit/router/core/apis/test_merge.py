"""One answer of the answers to a request's parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdcluster_router.core.apis.merge import DONE, MAX_EVENT_BYTES, BadAnswer, Naming, StreamMerge, merged

TWO = Naming("R", num_parts=2, num_choices=1)


def usage(num_prompt: int, num_answer: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_answer,
        "completion_tokens": num_answer,
        **more,
    }


def whole(part: int, *, num_prompt: int = 5, num_answer: int = 3, **more: Any) -> bytes:
    choice = {"index": 0, "text": f"text {part}", "logprobs": None, "finish_reason": "stop"}
    fields = {
        "id": f"cmpl-R-{part}", "object": "text_completion", "created": 100 + part, "model": "m", "choices": [choice],
        "system_fingerprint": None, "usage": usage(num_prompt, num_answer), **more,
    }  # fmt: skip
    return json.dumps(fields, separators=(",", ":")).encode()


def event(part: int, text: str = "a", **more: Any) -> bytes:
    fields = {
        "id": f"cmpl-R-{part}", "object": "text_completion", "created": 100 + part, "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": None}], **more,
    }  # fmt: skip
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def test_a_whole_answer_has_the_choices_in_order_and_else_the_first_parts_bytes() -> None:
    first = whole(0)
    answer = merged(TWO, [first, whole(1)])
    head, _, tail = first.partition(b'"choices":')
    assert answer.startswith(head.replace(b"cmpl-R-0", b"cmpl-R") + b'"choices":[{"index":0,"text":"text 0",')
    assert b'},{"index":1,"text":"text 1","logprobs":null,"finish_reason":"stop"}],"system_fingerprint":null' in answer
    assert json.loads(answer)["usage"] == usage(10, 6)
    assert tail


def test_numbers_and_texts_keep_their_bytes() -> None:
    odd = b'{"id":"x","choices":[{"index":0,"text":"\\u00e9\xc3\xa9","logprob":-1.10e-5}],"usage":{"prompt_tokens":1}}'
    answer = merged(TWO, [odd, odd])
    assert answer.count(b'"text":"\\u00e9\xc3\xa9","logprob":-1.10e-5}') == 2
    assert answer.startswith(b'{"id":"x",')


def test_a_prompts_tokens_count_once_and_those_of_answers_add_up() -> None:
    naming = Naming("R", num_parts=4, num_choices=2)
    answers = [whole(part, num_prompt=5 + part // 2, num_answer=part) for part in range(4)]
    assert json.loads(merged(naming, answers))["usage"] == usage(5 + 6, 0 + 1 + 2 + 3)


def test_details_of_usage_are_the_last_parts_and_reasoning_adds_up() -> None:
    def of(part: int) -> bytes:
        details = {"completion_tokens_details": {"reasoning_tokens": 2 + part}}
        return whole(part, usage=usage(5, 3, prompt_tokens_details={"cached_tokens": 16 * part}, **details))

    found = json.loads(merged(TWO, [of(0), of(1)]))["usage"]
    assert found["prompt_tokens_details"] == {"cached_tokens": 16}
    assert found["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_metrics_of_one_sequence_are_not_the_requests() -> None:
    assert json.loads(merged(TWO, [whole(0, metrics={"ttft": 1}), whole(1)]))["metrics"] is None
    assert "metrics" not in json.loads(merged(TWO, [whole(0), whole(1)]))


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"hello", b"{}", b'{"id":"a"}', b'{"id":"a","choices":[],"usage":{}}', b'{"id":1,"choices":[{}]}',
     b'{"id":"a","choices":[{},{}],"usage":{}}', b'{"id":"a","choices":[{}],"usage":null}', whole(1)[:-1]],
)  # fmt: skip
def test_an_answer_that_is_no_choice_is_a_bad_one(answer: bytes) -> None:
    with pytest.raises(BadAnswer):
        merged(TWO, [whole(0), answer])


def test_a_stream_has_the_events_as_they_come_under_one_id_and_one_end() -> None:
    merge = StreamMerge(TWO)
    found = [merge.feed(1, event(1)), merge.feed(0, event(0)), merge.feed(1, event(1, "b") + DONE), merge.end(1)]
    assert found[:3] == [
        event(1).replace(b"cmpl-R-1", b"cmpl-R").replace(b'"index":0', b'"index":1'),
        event(0).replace(b"cmpl-R-0", b"cmpl-R").replace(b"100", b"101"),
        event(1, "b").replace(b"cmpl-R-1", b"cmpl-R").replace(b'"index":0', b'"index":1'),
    ]
    assert found[3] == b""
    assert merge.feed(0, DONE) + merge.end(0) == DONE


def test_a_stream_tells_usage_once_behind_all_events() -> None:
    merge = StreamMerge(TWO)
    for part in (0, 1):
        merge.feed(part, event(part, usage=usage(5, 1)))
    for part in (1, 0):
        told = usage(5 + part, 3, prompt_tokens_details={"cached_tokens": 16 * part})
        assert merge.feed(part, event(part, choices=[], usage=told, metrics={"ttft": 1}) + DONE) == b""
    assert merge.end(0) == b""
    last, done, rest = merge.end(1).split(b"\n\n")
    found = json.loads(last.removeprefix(b"data: "))
    assert found["usage"] == usage(11, 6, prompt_tokens_details={"cached_tokens": 0})
    assert (found["id"], found["created"], found["choices"]) == ("cmpl-R", 100, [])
    assert "metrics" not in found
    assert (done + b"\n\n", rest) == (DONE, b"")


def test_usage_of_each_event_is_its_own_sequences() -> None:
    merge = StreamMerge(TWO)
    assert b'"usage":{"prompt_tokens":5,"total_tokens":6,' in merge.feed(0, event(0, usage=usage(5, 1)))


def test_comments_pass_and_an_event_in_pieces_is_held_until_it_is_whole() -> None:
    merge = StreamMerge(TWO)
    assert merge.feed(0, b": keep-alive\n\n") == b": keep-alive\n\n"
    raw = event(1)
    assert [merge.feed(1, raw[at : at + 1]) for at in range(len(raw) - 1)] == [b""] * (len(raw) - 1)
    assert merge.feed(1, raw[-1:]) != b""


@pytest.mark.parametrize(
    "raw",
    [b"data: {\n\n", b"data: []\n\n", b"data: {}\n\n", b'data: {"choices":[{},{}],"id":"a","created":1}\n\n',
     b'data: {"choices":[{}]}\n\n', b'data: {"choices":7}\n\n', b"x" * (MAX_EVENT_BYTES + 1),
     b"hello\n\n", b": hi\nhello\n\n", b"\xef\xbb\xbf" + event(0)],
    ids=len,
)  # fmt: skip
def test_what_is_no_stream_of_completions_is_a_bad_answer(raw: bytes) -> None:
    with pytest.raises(BadAnswer):
        StreamMerge(TWO).feed(0, raw)


def test_a_stream_without_its_done_is_a_bad_answer() -> None:
    """Else the whole would say that it is complete, and only the engine can know that."""
    merge = StreamMerge(TWO)
    merge.feed(0, event(0) + DONE)
    merge.feed(1, event(1))
    merge.end(0)
    with pytest.raises(BadAnswer, match="without its"):
        merge.end(1)


def test_a_stream_that_ends_within_an_event_or_without_usage_is_a_bad_answer() -> None:
    merge = StreamMerge(TWO)
    merge.feed(0, event(0)[:-1])
    with pytest.raises(BadAnswer, match="within an event"):
        merge.end(0)
    merge = StreamMerge(TWO)
    merge.feed(0, event(0, choices=[], usage=usage(5, 3)) + DONE)
    merge.end(0)
    merge.feed(1, DONE)
    with pytest.raises(BadAnswer, match="has no usage"):
        merge.end(1)
