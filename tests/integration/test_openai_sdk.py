"""The OpenAI SDK against a pool of real engines behaves as against one vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from integration.harness import Harness, Pool, Server, eventually, metric

pytestmark = pytest.mark.engines

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about two engines and one long road. " * 12}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture(scope="module")
def servers(harness: Harness) -> Iterator[tuple[Pool, Server]]:
    with harness.start_pool() as pool, harness.single_engine() as engine:
        yield pool, engine


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


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


def test_tools_reach_both_engines_alike(servers: tuple[Pool, Server]) -> None:
    pool, single, model = both(servers)
    wanted: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "tools": TOOLS}
    ours = pool.chat.completions.create(**wanted, tool_choice="none")
    assert ours.choices[0].message.content == (
        single.chat.completions.create(**wanted, tool_choice="none").choices[0].message.content
    )


def test_several_answers_and_prompt_lists_are_prefilled_by_decode_and_right(servers: tuple[Pool, Server]) -> None:
    pool, single, model = both(servers)
    prompts = ["Hello, what can you do", "Why is the sky blue"]
    wanted: dict[str, Any] = {"model": model, "prompt": prompts, "max_tokens": 8, "temperature": 0, "n": 1}
    assert [c.text for c in pool.completions.create(**wanted).choices] == [
        c.text for c in single.completions.create(**wanted).choices
    ]
    assert len(pool.completions.create(**{**wanted, "prompt": "Hello", "n": 3, "temperature": 1}).choices) == 3


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
    question = {"model": both(servers)[2], "messages": MESSAGES, "max_tokens": 1}
    ours, theirs = (httpx.post(f"{server.url}{path}", json=question, timeout=60) for server in servers)
    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
    assert ours.status_code == 200
