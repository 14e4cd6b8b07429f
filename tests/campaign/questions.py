"""What the clients of a campaign ask, and the answers of a single engine that nobody disturbs.

A fixed set: the same for every seed. Prompts end around every border of a 32-token block, some share prefixes, so
that prefix caches on either side are hit. Each is asked for one token, for a few, and for enough to be cut in between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

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
    """The answers of the engine at ``url``. Waits for all."""
    with ThreadPoolExecutor(8, thread_name_prefix="expected") as threads:
        return dict(zip(questions, threads.map(lambda question: _ask(url, question), questions), strict=True))


def _ask(url: str, question: Question) -> Answer:
    answer = complete(url, question.prompt, question.max_tokens)
    return Answer(answer.token_ids, answer.text, answer.reply["choices"][0]["finish_reason"])


def _tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choice(_VOCAB) for _ in range(length))
