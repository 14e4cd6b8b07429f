"""The OpenAI SDK against a pool of real engines behaves as against one vLLM engine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from integration.harness import Harness, Pool, Server, eventually, metric
from integration.prefilled import num_prefilled
from patience import PATIENCE_S

pytestmark = pytest.mark.engines

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about two engines and one long road. " * 12}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]


ALIAS = "fast"


@pytest.fixture(scope="module")
def servers(harness: Harness) -> Iterator[tuple[Pool, Server]]:
    alias = ("--model-alias", f"{ALIAS}={harness.model}")
    with harness.start_pool(router_args=alias) as pool, harness.single_engine() as engine:
        yield pool, engine


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def both(servers: tuple[Pool, Server]) -> tuple[openai.OpenAI, openai.OpenAI, str]:
    pool, engine = servers
    through_pool = client_of(pool.url)
    return through_pool, client_of(engine.url), through_pool.models.list().data[0].id


def test_a_chat_answer_is_the_single_engines_with_its_usage_and_logprobs(servers: tuple[Pool, Server]) -> None:
    pool, single, model = both(servers)
    wanted: dict[str, Any] = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
    }
    ours = pool.chat.completions.create(**wanted, top_logprobs=2)
    theirs = single.chat.completions.create(**wanted, top_logprobs=2)
    assert ours.choices[0].message.content == theirs.choices[0].message.content
    assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
    assert ours.usage is not None
    assert theirs.usage is not None
    assert (ours.usage.prompt_tokens, ours.usage.completion_tokens) == (theirs.usage.prompt_tokens, 12)
    assert ours.choices[0].logprobs is not None
    assert theirs.choices[0].logprobs is not None
    pairs = zip(ours.choices[0].logprobs.content or (), theirs.choices[0].logprobs.content or (), strict=True)
    assert all(a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-3) for a, b in pairs)


def test_a_streamed_chat_says_the_same_and_ends_with_the_usage(servers: tuple[Pool, Server]) -> None:
    pool, single, model = both(servers)
    wanted: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    chunks = list(pool.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == single.chat.completions.create(**wanted).choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    # vLLM joins tokens that come while its API server is busy, all of them if need be: their number says nothing.
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_an_alias_is_listed_and_answered_as_its_model_under_the_models_own_name(servers: tuple[Pool, Server]) -> None:
    pool, single, model = both(servers)
    assert [card.id for card in pool.models.list().data] == [model, ALIAS]
    wanted: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    since = time.monotonic()
    ours = pool.chat.completions.create(model=ALIAS, **wanted)
    theirs = single.chat.completions.create(model=model, **wanted)
    assert (ours.model, ours.choices[0].message.content) == (theirs.model, theirs.choices[0].message.content)
    chunks = list(pool.chat.completions.create(model=ALIAS, **wanted, stream=True))
    assert {chunk.model for chunk in chunks} == {model}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == theirs.choices[0].message.content
    several = pool.chat.completions.create(**{**wanted, "model": ALIAS, "n": 2, "temperature": 1, "seed": 1})
    assert (several.model, len(several.choices)) == (model, 2)
    assert eventually(lambda: num_prefilled(servers[0], since) == 4), "each sequence was pushed"


def test_tools_reach_both_engines_alike(servers: tuple[Pool, Server]) -> None:
    pool, single, model = both(servers)
    wanted: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "tools": TOOLS}
    ours = pool.chat.completions.create(**wanted, tool_choice="none")
    assert ours.choices[0].message.content == (
        single.chat.completions.create(**wanted, tool_choice="none").choices[0].message.content
    )


HI: list[Any] = [{"role": "user", "content": "hi"}]
SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts": ("completions", {"prompt": ["Hello, what can you do", "Why is the sky blue"], "temperature": 0}),
    "tokens": ("completions", {"prompt": [[5, 6, 7] * 9, [8, 9]], "temperature": 0, "logprobs": 2}),
    "choices": ("completions", {"prompt": "Hello, what can you do", "n": 3, "seed": 7, "return_token_ids": True}),
    "odd": ("completions", {"prompt": "Hello, what can you do", "n": 2.0, "seed": 7}),
    "odder": ("chat/completions", {"messages": HI, "n": "2", "seed": 7}),
    "both": ("completions", {"prompt": ["Hello", "Why is the sky blue"], "n": 2, "seed": 7}),
    "chat": ("chat/completions", {"messages": HI, "n": 3, "seed": 7, "logprobs": True, "top_logprobs": 1}),
}


def asked(url: str, path: str, body: dict[str, Any]) -> bytes:
    answer = httpx.post(f"{url}/v1/{path}", json={"max_tokens": 8, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    own = rb'("id":|"system_fingerprint":)"[^"]*"|("created":)[0-9]+|-?[0-9]+[.][0-9e-]+'
    return re.sub(own, rb"\1\g<2>0", answer.content)


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_sequences_are_answered_as_by_one_engine_byte_for_byte(servers: tuple[Pool, Server], kind: str) -> None:
    """But for ids, times, log probabilities' digits, and the fingerprint, which an engine makes of its options."""
    pool, single = servers
    path, body = SEVERAL[kind]
    assert asked(pool.url, path, body) == asked(single.url, path, body)


def said(stream: bytes) -> tuple[dict[int, tuple[str, str | None]], list[Any], bytes]:
    """Text and end of each choice, what is told of usage, and the last event. vLLM may join tokens of a choice."""
    *events, last, _ = stream.split(b"\n\n")
    texts: dict[int, tuple[str, str | None]] = {}
    told = [json.loads(event.removeprefix(b"data: ")) for event in events]
    for choice in [choice for one in told for choice in one["choices"]]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        texts[choice["index"]] = (texts.get(choice["index"], ("", None))[0] + text, choice["finish_reason"])
    return texts, [one["usage"] for one in told if not one["choices"]], last


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_stream_of_several_sequences_says_what_one_engines_says(servers: tuple[Pool, Server], kind: str) -> None:
    pool, single = servers
    path, body = SEVERAL[kind]
    more = {"stream": True, "stream_options": {"include_usage": True}}
    ours, theirs = (said(asked(url, path, {**body, **more})) for url in (pool.url, single.url))
    assert ours == theirs


def test_several_sequences_are_pushed_and_leave_nothing_behind(servers: tuple[Pool, Server]) -> None:
    pool, _ = servers
    prompts = [[200 + number] * 40 for number in range(3)]
    since = time.monotonic()
    asked(pool.url, "completions", {"prompt": prompts, "n": 2, "seed": 1})
    assert eventually(lambda: num_prefilled(pool, since) == 6)
    lines = [line for line in pool.router.read_trace("request") if line["received_at"] >= since]
    assert [line["status"] for line in lines] == [200] * 6
    assert eventually(lambda: sum(metric(engine.url, "vllm:kv_cache_usage_perc") for engine in pool.engines) == 0)


@pytest.mark.parametrize(
    "body",
    [{"prompt": [[5], [5] * 9000]}, {"prompt": "a", "n": 2, "temperature": 0}, {"prompt": ["a", "b"], "model": "none"}],
)
@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["plain", "stream"])
def test_several_sequences_of_which_one_is_refused_are_refused_as_by_one_engine(
    servers: tuple[Pool, Server], body: dict[str, Any], more: dict[str, Any]
) -> None:
    answers = [httpx.post(f"{one.url}/v1/completions", json={**body, **more}, timeout=PATIENCE_S) for one in servers]
    assert answers[0].status_code == answers[1].status_code
    theirs = answers[1].text
    if body.get("model") == "none":  # vLLM tells its names, and ours tells the alias after them.
        theirs = theirs.replace("<path>", f"<path>, {ALIAS}.")
    assert answers[0].json() == json.loads(theirs)


def test_errors_are_the_sdks_own_and_leave_nothing_behind(servers: tuple[Pool, Server]) -> None:
    pool, _, model = both(servers)
    with pytest.raises(openai.NotFoundError):
        pool.chat.completions.create(model="no such model", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        pool.chat.completions.create(model=model, messages=MESSAGES, max_tokens=-1)
    with pytest.raises(openai.BadRequestError):
        pool.completions.create(model=model, prompt=[1] * 9000, max_tokens=1)
    engines = servers[0].engines
    assert eventually(lambda: sum(metric(engine.url, "vllm:kv_cache_usage_perc") for engine in engines) == 0)


def test_a_stream_that_is_closed_early_frees_both_engines(servers: tuple[Pool, Server]) -> None:
    pool, _, model = both(servers)
    stream = pool.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert eventually(lambda: sum(map(load_of, servers[0].engines)) == 0)


def load_of(engine: Server) -> float:
    """0 when no request runs and no block is in use."""
    return metric(engine.url, "vllm:num_requests_running") + metric(engine.url, "vllm:kv_cache_usage_perc")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_a_question_of_tokens_is_answered_as_by_the_single_engine(servers: tuple[Pool, Server], path: str) -> None:
    model = both(servers)[2]
    question = {"model": model, "messages": MESSAGES, "max_tokens": 1}
    ours, theirs = (httpx.post(f"{server.url}{path}", json=question, timeout=PATIENCE_S) for server in servers)
    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
    assert ours.status_code == 200
