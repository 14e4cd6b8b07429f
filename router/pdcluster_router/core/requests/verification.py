"""Decides whether one request proves that this pair hands KV over, and how long its prompt must be.

A proof needs all of these, from one request that was sent once and may not be recomputed:

    decode asked this router for prompt tokens        else decode had them, or computes them itself
    prefill ended well, and the answer is whole       else it failed, and says why
    decode's receipt names all tokens it asked for    else they were not pushed, whatever the answer looks like
    the receipt says that their content was compared  else heads, tokens or blocks may have changed places

A prompt is random words: no prefix cache can have it. The router does not know the model's vocabulary, so a word may be
one token, or one token for each letter and for the space. Decode's reservation says how many tokens the prompt has, and
how large a KV block is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Final

from pdcluster_protocol.params import Receipt

FIRST_WORDS: Final = 300
"""So many words are 300 to 1,200 tokens: more than a block of 256, less than a context of 2,048."""
LEAST_WORDS: Final = 12
"""Shorter prompts are not tried: a model that refuses one of so many words is of no use."""
MAX_WORDS: Final = 16384
_SHRINK: Final = 5
_WORD_LETTERS: Final = 3
_LETTERS: Final = "abcdefghijklmnop"
"""16 letters, so that each random byte gives two of them without a bias."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Facts of decode's reservation. ``num_tokens``: those that decode asked for. ``block_tokens``: those of its
    largest block."""

    num_prompt_tokens: int
    num_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One request, when it was over."""

    num_words: int
    status: int
    """The status of decode's answer, or of ours when there was none."""
    error: str
    """The error in that answer; empty: the answer is whole, and no error."""
    asked: Asked | None
    """None: no reservation has come."""
    prefill_problem: str
    """Why prefill did not end well; empty when it did."""
    receipt: Receipt | None
    """Decode's receipt; None: the answer has none."""

    @property
    def is_prompt_refused(self) -> bool:
        """Decode takes no such prompt: mostly because it is longer than the model's context."""
        return self.status == 400

    @property
    def fills_a_block(self) -> bool:
        return self.asked is not None and self.asked.num_tokens >= self.asked.block_tokens


def problem_of(trial: Trial) -> str:
    """Why this trial proves nothing; empty: it proves that KV was pushed."""
    if trial.error:
        return trial.error if trial.asked else f"{trial.error}; decode had sent this router no reservation. {_NO_CALL}"
    if trial.asked is None:
        return f"decode answered alone, it sent this router no reservation. {_NO_CALL}"
    if trial.prefill_problem:
        return trial.prefill_problem
    return _receipt_problem(trial.receipt, trial.asked.num_tokens)


_SAME: Final = "run the same pdcluster on router and engines"
_NO_CALL: Final = (
    "If its log says transfer_refused, it has another secret or version than the router; else look whether it can "
    "reach this router's --advertise-url"
)


def next_num_words(trial: Trial) -> int | None:
    """The words of the prompt to try next; None: another length would prove no more."""
    if trial.is_prompt_refused:
        shorter = trial.num_words // _SHRINK
        return shorter if trial.num_words <= FIRST_WORDS and shorter >= LEAST_WORDS else None
    if problem_of(trial) or trial.asked is None or trial.fills_a_block or trial.num_words != FIRST_WORDS:
        return None
    # A tenth more, because the next words are others.
    needed = ceil(1.1 * trial.num_words * (trial.asked.block_tokens + 1) / max(1, trial.asked.num_tokens))
    return min(needed, MAX_WORDS)


def num_random_bytes(num_words: int) -> int:
    """The number of random bytes that ``prompt_of`` needs."""
    return num_words * _WORD_LETTERS // 2 + 1


def prompt_of(num_words: int, random_bytes: bytes) -> str:
    """Words of three letters: "abc pno ...". No tokenizer joins words that it has never seen side by side."""
    letters = "".join(_letters_of(random_bytes))
    ends = range(_WORD_LETTERS, num_words * _WORD_LETTERS + 1, _WORD_LETTERS)
    return " ".join(letters[end - _WORD_LETTERS : end] for end in ends)


def _letters_of(random_bytes: bytes) -> Iterable[str]:
    for byte in random_bytes:
        yield _LETTERS[byte >> 4]
        yield _LETTERS[byte & 15]


def _receipt_problem(receipt: Receipt | None, num_asked: int) -> str:
    if receipt is None:
        return f"decode's answer has no receipt: {_SAME}"
    if (num_received := receipt.pdcluster_received_tokens) < num_asked:
        return f"decode received {num_received} of the {num_asked} tokens that it asked for, and computed the rest"
    if not receipt.pdcluster_is_content_compared:
        return f"decode received {num_received} tokens and did not compare them with what prefill pushed: {_SAME}"
    return ""
