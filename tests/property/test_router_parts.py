"""Laws of requests in parts: what each part asks for, and one answer of all, however their bytes come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_router.core.apis.merge import DONE, Naming, StreamMerge, merged
from pdcluster_router.core.apis.parts import MAX_PARTS, taken_apart
from pdcluster_router.core.apis.rewrite import BadBody, parse_body

TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)
PROMPTS = st.one_of(
    TEXTS,
    st.lists(st.integers(0, 99), min_size=1, max_size=3),
    st.lists(TEXTS, min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=4),
)
REST = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 9) | st.none(),
        "temperature": st.floats(0.1, 2) | st.none(),
        "stop": st.lists(TEXTS, max_size=2),
        "user": TEXTS,
        "stream": st.booleans(),
        "vllm_xargs": st.dictionaries(st.sampled_from("ab"), st.integers()),
    },
)


def prompts_of(prompt: Any) -> list[Any]:
    """As vLLM reads them: texts, or lists of tokens."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if is_one else list(prompt)


def wanted(fields: dict[str, Any]) -> list[tuple[Any, int | None]]:
    """Prompt and seed of each choice, by its index: vLLM's rule."""
    seed = fields.get("seed")
    numbers = range(fields.get("n", 1))
    return [
        (prompt, None if seed is None else seed + number)
        for prompt in prompts_of(fields["prompt"])
        for number in numbers
    ]


@given(PROMPTS, st.integers(1, 4), REST, st.booleans(), st.booleans())
def test_each_part_asks_for_one_choice_and_for_all_else_as_the_client_did(
    prompt: Any, n: int, rest: dict[str, Any], names_n: bool, is_ascii: bool
) -> None:
    fields = {**rest, "prompt": prompt, **({"n": n} if names_n else {})}
    body = parse_body(json.dumps(fields, ensure_ascii=is_ascii).encode())
    choices = wanted(fields)
    parts = taken_apart(body, is_chat=False, num_header_bytes=0)
    assert (parts is None) == (len(choices) == 1)
    if parts is None:
        return
    asked = [json.loads(b"".join(part.for_decode(b'{"a":1}'))) for part in parts.bodies]
    assert [(prompts_of(one["prompt"]), one.get("seed")) for one in asked] == [([text], seed) for text, seed in choices]
    for one in asked:
        assert one.get("n", 1) == 1
        assert one["kv_transfer_params"] == {"a": 1}
        kept = {key: value for key, value in one.items() if key not in ("prompt", "n", "seed", "kv_transfer_params")}
        assert kept == {key: value for key, value in rest.items() if key != "seed"}


@given(st.text('[],"12 a{}:', max_size=12), st.booleans())
def test_any_prompt_is_taken_apart_or_left_alone(prompt: str, is_chat: bool) -> None:
    try:
        body = parse_body(f'{{"prompt":{prompt},"n":2}}'.encode())
    except BadBody:
        return
    parts = taken_apart(body, is_chat=is_chat, num_header_bytes=0)
    assert parts is None or 1 < len(parts.bodies) <= MAX_PARTS


def usage(num_prompt: int, num_answer: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_answer, "completion_tokens": num_answer}


@dataclass(frozen=True)
class Said:
    """All that the engines of a request said."""

    naming: Naming
    tokens: list[list[str]]
    """By part."""
    tells_usage: bool

    def id_of(self, part: int) -> str:
        return f"cmpl-{self.naming.part_id(part)}"

    def usage_of(self, part: int) -> dict[str, int]:
        return usage(10 + part // self.naming.num_choices, len(self.tokens[part]))

    def common(self, part: int) -> dict[str, Any]:
        return {"id": self.id_of(part), "object": "text_completion", "created": 100 + part, "model": "m"}

    def stream_of(self, part: int) -> bytes:
        events: list[dict[str, Any]] = [
            {**self.common(part), "choices": [{"index": 0, "text": text}]} for text in self.tokens[part]
        ]
        if self.tells_usage:
            events.append({**self.common(part), "choices": [], "usage": self.usage_of(part)})
        return b"".join([b"data: " + json.dumps(one, ensure_ascii=False).encode() + b"\n\n" for one in events]) + DONE

    def whole_of(self, part: int) -> bytes:
        text = "".join(self.tokens[part])
        choices = [{"index": 0, "text": text}]
        return json.dumps({**self.common(part), "choices": choices, "usage": self.usage_of(part)}).encode()

    @property
    def usage(self) -> dict[str, int]:
        """Of the request: vLLM's rule."""
        parts = [self.usage_of(part) for part in range(self.naming.num_parts)]
        num_prompt = sum(one["prompt_tokens"] for one in parts[:: self.naming.num_choices])
        num_answer = sum(one["completion_tokens"] for one in parts)
        return usage(num_prompt, num_answer)


@st.composite
def saids(draw: st.DrawFn) -> Said:
    num_choices = draw(st.integers(1, 3))
    naming = Naming(draw(st.sampled_from(["R", "R-0", "7"])), draw(st.integers(1, 3)) * num_choices, num_choices)
    tokens = st.lists(TEXTS, min_size=1, max_size=4)
    return Said(naming, [draw(tokens) for _ in range(naming.num_parts)], draw(st.booleans()))


def events_of(stream: bytes) -> list[Any]:
    assert stream.endswith(DONE)
    assert stream.count(DONE) == 1
    return [json.loads(one.removeprefix(b"data: ")) for one in stream.removesuffix(DONE).split(b"\n\n")[:-1]]


@given(saids(), st.data())
def test_a_whole_stream_says_of_each_choice_what_its_part_said_and_the_rest_once(
    said: Said, data: st.DataObject
) -> None:
    left = {part: said.stream_of(part) for part in range(said.naming.num_parts)}
    merge, stream, order = StreamMerge(said.naming), b"", []
    while left:
        part = data.draw(st.sampled_from(sorted(left)))
        size = data.draw(st.integers(1, 150))
        piece, left[part] = left[part][:size], left[part][size:]
        out = merge.feed(part, piece)
        order += [part] * out.count(b'"index":')
        stream += out
        if not left[part]:
            del left[part]
            stream += merge.end(part)
    events = events_of(stream)
    tokens = [one for one in events if one["choices"]]
    for part, texts in enumerate(said.tokens):
        assert [one["choices"][0]["text"] for one in tokens if one["choices"][0]["index"] == part] == texts
    assert [one["choices"][0]["index"] for one in tokens] == order
    assert {one["id"] for one in events} == {f"cmpl-{said.naming.request_id}"}
    assert {one["created"] for one in events} == {100 + order[0]}
    assert [one["usage"] for one in events if not one["choices"]] == [said.usage] * said.tells_usage


@given(saids())
def test_a_whole_answer_says_of_each_choice_what_its_part_said(said: Said) -> None:
    answer = json.loads(merged(said.naming, [said.whole_of(part) for part in range(said.naming.num_parts)]))
    assert answer["choices"] == [{"index": part, "text": "".join(texts)} for part, texts in enumerate(said.tokens)]
    assert (answer["id"], answer["usage"]) == (f"cmpl-{said.naming.request_id}", said.usage)
