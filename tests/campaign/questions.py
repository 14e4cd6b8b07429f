"""What the clients of a campaign ask, and the answers of a single engine that nobody disturbs.

A fixed set: the same for every seed. Prompts end around every border of a 32-token block, some share prefixes, so
that prefix caches on either side are hit. Each is asked for one token, for a few, and for enough to be cut in between.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from integration.harness import complete

BLOCK_SIZE: Final = 32
"""Tokens in a KV block of every engine of a campaign: small, so that short prompts have many."""
MAX_PROMPT: Final = 300
MAX_TOKENS: Final = (1, 8, 40)

_LENGTHS: Final = (1, 2, 16, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 159, 200, 255, 256, 257, 290, MAX_PROMPT)
_SHARED: Final = (32, 64, 100, 160, 224, 250)
_VOCAB: Final = range(50, 1000)


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and how many tokens are wanted."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What greedy decoding says. ``finish_reason`` as in OpenAI's API."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def make_questions() -> tuple[Question, ...]:
    """Every prompt with every number of tokens."""
    rng = random.Random(41)
    prompts = [_tokens(rng, length) for length in _LENGTHS]
    shared = _tokens(rng, max(_SHARED))
    prompts += [(*shared[:cut], *_tokens(rng, rng.randint(1, MAX_PROMPT - cut))) for cut in _SHARED]
    return tuple(Question(prompt, max_tokens) for prompt in prompts for max_tokens in MAX_TOKENS)


def ask_single_engine(url: str, questions: Sequence[Question]) -> dict[Question, Answer]:
    """The answers of the engine at ``url``. Waits for all.

    Never asks for logprobs: vLLM compiles what they need with a C++ compiler, which an engine in a pod does not have.
    """
    return {question: _answer_in(reply) for question, reply in _ask_all(url, questions)}


def ask_for_clear_answers(url: str, questions: Sequence[Question], rounding: float) -> dict[Question, Answer]:
    """As ``ask_single_engine``, without the questions that another engine may answer otherwise.

    Those have a token that was chosen by less than ``rounding``, a difference of logprobs.
    """
    asked = list(_ask_all(url, questions, logprobs=2, return_tokens_as_token_ids=True))
    margins = {question: margin_of(reply["choices"][0]["logprobs"]["top_logprobs"]) for question, reply in asked}
    return {question: _answer_in(reply) for question, reply in asked if margins[question] >= rounding}


def _ask_all(url: str, questions: Sequence[Question], **body: Any) -> Iterator[tuple[Question, dict[str, Any]]]:
    with ThreadPoolExecutor(8, thread_name_prefix="expected") as threads:
        asked = threads.map(lambda one: complete(url, one.prompt, one.max_tokens, **body).reply, questions)
        yield from zip(questions, asked, strict=True)


def _answer_in(reply: dict[str, Any]) -> Answer:
    choice = reply["choices"][0]
    return Answer(tuple(choice["token_ids"]), choice["text"], choice["finish_reason"])


def margin_of(steps: Sequence[Mapping[str, float]]) -> float:
    """By how much the best token was ahead of the second best, where it was closest."""
    ordered = [sorted(step.values(), reverse=True) for step in steps]
    return min(best - second for best, second, *_ in ordered)


def _tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choice(_VOCAB) for _ in range(length))
