"""Requests to pooling models, as vLLM 0.32 has them (``entrypoints/pooling``): embeddings, scores, ranks, classes.

    client    {"model": "e5", "input": ["a", "b"], ...}
    decode    {"model": "e5", "input": ["a", "b"], ...}

A pooling model computes prompts and makes no tokens, so there is no KV to hand over: one decode engine serves such a
request by itself, and gets the client's own bytes. The router uses the model's name only. An answer is JSON, or
binary, and no mark in it says that the engine gave the request up: vLLM answers an error then.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdcluster_protocol.params import DecodeParams
from pdcluster_router.core.apis.estimate import estimate_prompt_tokens
from pdcluster_router.core.apis.rewrite import ABSENT, BadBody, Bytes, ClientBody, Parts, Said, scanned
from pdcluster_router.core.apis.sse import KEPT_BYTES, ErrorWatch

POOLING_PATHS: Final = (
    b"/v1/embeddings",
    b"/v2/embed",
    b"/classify",
    b"/pooling",
)
SCORING_PATHS: Final = (
    b"/score",
    b"/v1/score",
    b"/rerank",
    b"/v1/rerank",
    b"/v2/rerank",
)
_MOST_COUNTED: Final = 1000
"""Of a longer list the strings are counted: to take 8 MiB of short ones apart would cost a second and 300 MB."""
_MAX_QUERY_TOKENS: Final = 32 << 10
"""The most tokens of a text that count again. Few models have a longer context. vLLM cuts a longer text only if the
request asks for it."""
_MAX_REPEATS: Final = 128
"""The most that repeated texts add, in times of the body's own tokens, so that no request outweighs all others."""


class PoolingBody(ClientBody, frozen=True):
    """A request to a pooling model. Its answer is no stream, and has no tokens."""

    @property
    def needs_pair(self) -> bool:
        return False

    @property
    def needs_local_prefill(self) -> bool:
        return True

    @property
    def wants_decode_alone(self) -> bool:
        return True

    @property
    def max_answer_tokens(self) -> int | None:
        return 0

    def for_decode(self, params: DecodeParams | bytes | None) -> Parts:  # noqa: ARG002  # there is no transfer
        """The client's own bytes, with the model's name for engines in place of an alias."""
        return self._followed_by([])


def parse_pooling(raw: Bytes) -> PoolingBody:
    """The client's request body, scanned. ``raw`` must not change from now on.

    Raises:
        BadBody: It is not a JSON object, or its ``vllm_xargs`` names transfer parameters.
    """
    begin, said = scanned(raw, _SAID)
    return _body_of(raw, begin, said, estimate_prompt_tokens(raw))


def parse_scoring(raw: Bytes) -> PoolingBody:
    """As ``parse_pooling``, for a score or a rank. A cross-encoder computes the one text again beside each of the
    others, so that text counts as often.

    A query of 10 tokens and 3 documents of 100 each: 3 * 10 + 300. Models that compute each text by itself cost less.

    Raises:
        BadBody: As ``parse_pooling``.
    """
    begin, said = scanned(raw, _SAID_SCORING)
    num_tokens = estimate_prompt_tokens(raw)
    try:
        again = max(_tokens_again(getattr(said, one), getattr(said, others)) for one, others in _SCORED)
    except RecursionError as error:  # This scan has a few frames more on the stack than the first one.
        raise BadBody("the request body is nested too deeply") from error
    return _body_of(raw, begin, said, num_tokens + min(again, _MAX_REPEATS * num_tokens))


class SaidScoring(Said):
    """The keys of texts that are scored: vLLM 0.32 ``entrypoints/pooling/scoring/protocol.py``."""

    query: msgspec.Raw = ABSENT
    queries: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    items: msgspec.Raw = ABSENT
    text_1: msgspec.Raw = ABSENT
    text_2: msgspec.Raw = ABSENT
    data_1: msgspec.Raw = ABSENT
    data_2: msgspec.Raw = ABSENT


class PoolingWatch(ErrorWatch):
    """Passes all bytes on: no bytes mark the answer of a pooling model as given up, and it may be binary."""

    __slots__ = ()

    def feed(self, chunk: bytes) -> bytes:
        self.end += chunk[-KEPT_BYTES:]
        del self.end[:-KEPT_BYTES]
        return chunk


def _body_of(raw: Bytes, begin: int, said: Said, num_tokens: int) -> PoolingBody:
    return PoolingBody(raw, begin, raw.rindex(b"}"), Said(model=said.model), False, num_tokens, said.model, b"")


def _tokens_again(one: msgspec.Raw, others: msgspec.Raw) -> int:
    """The tokens of ``one`` for each of ``others`` but the first. Two lists of one length are scored text by text."""
    if one is ABSENT or others is ABSENT:
        return 0
    text = bytes(one)
    num_again = 0 if _num_texts(text) > 1 else _num_texts(bytes(others)) - 1
    return num_again * min(estimate_prompt_tokens(text), _MAX_QUERY_TOKENS)


def _num_texts(texts: bytes) -> int:
    """How many texts a value has, at least 1. Of a list of many, the strings are counted."""
    if not texts.startswith(b"["):
        return 1
    num_first = sum(text is not ABSENT for text in msgspec.structs.astuple(_FIRST_TEXTS.decode(texts)))
    return max(1, num_first if num_first < _MOST_COUNTED else max(num_first, _num_strings(texts)))


def _num_strings(texts: bytes) -> int:
    if b"\\" not in texts:
        return texts.count(b'"') // 2
    plain = texts.replace(rb"\\", b"")  # A backslash that is left escapes what follows it.
    return (plain.count(b'"') - plain.count(rb"\"")) // 2


_SAID: Final = msgspec.json.Decoder(Said)
_SAID_SCORING: Final = msgspec.json.Decoder(SaidScoring)
_FIRST_TEXTS: Final[msgspec.json.Decoder[msgspec.Struct]] = msgspec.json.Decoder(
    msgspec.defstruct("FirstTexts", [(f"text_{n}", msgspec.Raw, ABSENT) for n in range(_MOST_COUNTED)], array_like=True)
)
"""Skips all elements of a list behind the first ones."""
_SCORED: Final = (
    ("query", "documents"),
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
"""The keys that vLLM takes together: a text that is scored, and the texts that it is scored with."""
