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
from pdcluster_router.core.apis.rewrite import Bytes, ClientBody, Parts, Said, scanned

POOLING_PATHS: Final = (
    b"/v1/embeddings",
    b"/v2/embed",
    b"/score",
    b"/v1/score",
    b"/rerank",
    b"/v1/rerank",
    b"/v2/rerank",
    b"/classify",
    b"/pooling",
)


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
    only_model, num_tokens = Said(model=said.model), estimate_prompt_tokens(raw)
    return PoolingBody(raw, begin, raw.rindex(b"}"), only_model, False, num_tokens, said.model, b"")


_SAID: Final = msgspec.json.Decoder(Said)
