"""A pooling model on a real engine beside a real pair: the answers through the router are the engine's own.

The engine runs without our connector, as ``vllm serve --runner pooling`` starts it, and is named by ``--decode``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest

from integration.harness import Harness, HttpError, Server, complete, opened
from patience import PATIENCE_S
from pdcluster_cli.processes.engines import PoolRole

pytestmark = [pytest.mark.engines, pytest.mark.costly]

MODEL, ALIAS, CLASSES = "tiny-embed", "embed-of-ours", "tiny-classify"
POOLING_ARGS: Final = ("--runner", "pooling", "--convert")
TEXTS: Final = ["the long road", "two engines", "a b"]
BODIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "embeddings": ("/v1/embeddings", {"input": TEXTS}),
    "tokens": ("/v1/embeddings", {"input": [[1, 2, 3], [4, 5]], "encoding_format": "base64"}),
    "bytes": ("/v1/embeddings", {"input": TEXTS * 20, "encoding_format": "bytes"}),
    "messages": ("/v1/embeddings", {"messages": [{"role": "user", "content": "the long road"}]}),
    "embed": ("/v2/embed", {"texts": TEXTS[:2], "embedding_types": ["float"]}),
    "score": ("/score", {"text_1": "a road", "text_2": TEXTS}),
    "score_v1": ("/v1/score", {"queries": "a road", "documents": TEXTS}),
    "rerank": ("/rerank", {"query": "a road", "documents": TEXTS}),
    "rerank_v1": ("/v1/rerank", {"query": "a road", "documents": TEXTS, "top_n": 1}),
    "rerank_v2": ("/v2/rerank", {"query": "a road", "documents": TEXTS}),
    "pooling": ("/pooling", {"input": "the long road"}),
    "classify": ("/classify", {"input": TEXTS, "model": CLASSES}),
    "pooled_classes": ("/pooling", {"input": TEXTS, "model": CLASSES}),
    "too_long": ("/v1/embeddings", {"input": [1] * 9000}),
    "no_input": ("/v1/embeddings", {}),
    "bad_format": ("/v1/embeddings", {"input": "a", "encoding_format": "smoke signals"}),
}
REFUSED: Final = ("too_long", "no_input", "bad_format")
UNSURE: Final = ("classify", "pooled_classes")
"""The tiny model has no weights for classes, so vLLM takes what lies in memory: the answer may be an error, and is the
same twice."""
_CREATED: Final = re.compile(rb'("created": ?)\d+')


@pytest.fixture(scope="module")
def servers(harness: Harness) -> Iterator[tuple[Server, dict[str, Server], Server]]:
    """The router, the engine of each pooling model, and the pair's decode engine."""
    pooled = (
        harness.single_engine((*POOLING_ARGS, "embed", "--served-model-name", MODEL)),
        harness.single_engine((*POOLING_ARGS, "classify", "--served-model-name", CLASSES)),
    )
    pair = harness.start(harness.plan(PoolRole.PREFILL), harness.plan(PoolRole.DECODE))
    with pooled[0] as embeds, pooled[1] as classifies, pair as (prefill, decode):
        alias = ("--model-alias", f"{ALIAS}={MODEL}")
        with harness.router([prefill], [decode, embeds, classifies], alias) as router:
            yield router, {MODEL: embeds, CLASSES: classifies}, decode


def told(server: Server, path: str, body: dict[str, Any]) -> tuple[int, bytes, bytes, bytes]:
    """Status, content type, vLLM's ``metadata`` and body of an answer, without the second of its creation."""
    raw, headers = json.dumps(body).encode(), {"x-request-id": "r-7"}
    try:
        with opened(f"{server.url}{path}", "POST", raw, PATIENCE_S, headers) as response:
            kind, metadata = (response.headers.get(name, "").encode() for name in ("content-type", "metadata"))
            return response.status, kind, _CREATED.sub(rb"\1", metadata), _CREATED.sub(rb"\1", response.read())
    except HttpError as error:
        return error.status, b"", b"", error.body.encode()


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_is_the_engines_byte_for_byte(servers: tuple[Server, dict[str, Server], Server], name: str) -> None:
    router, engines, _ = servers
    path, body = BODIES[name]
    asked = {"model": MODEL, **body}
    expected = told(engines[asked["model"]], path, asked)
    assert told(router, path, asked) == expected
    assert name in UNSURE or expected[0] == (400 if name in REFUSED else 200)


def test_openais_sdk_reads_embeddings_by_the_model_and_by_an_alias(
    servers: tuple[Server, dict[str, Server], Server],
) -> None:
    router, engines, _ = servers
    ours, theirs = (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        for server in (router, engines[MODEL])
    )
    expected = theirs.embeddings.create(model=MODEL, input=TEXTS)
    assert [len(one.embedding) for one in expected.data] == [256] * len(TEXTS)
    for name in (MODEL, ALIAS):
        found = ours.embeddings.create(model=name, input=TEXTS)
        assert ([one.embedding for one in found.data], found.usage) == (
            [one.embedding for one in expected.data],
            expected.usage,
        )
    assert {MODEL, CLASSES, ALIAS} <= {model.id for model in ours.models.list().data}


def test_a_chat_model_beside_them_is_served_by_its_pair_and_says_itself_that_it_has_no_embeddings(
    servers: tuple[Server, dict[str, Server], Server], harness: Harness
) -> None:
    router, _, decode = servers
    model = str(harness.model)
    named: tuple[dict[str, Any], ...] = ({"model": model}, {})
    assert all(complete(router.url, "Why is the sky blue?", 4, **body).token_ids for body in named)
    asked = {"model": model, "input": "a"}
    status, _, _, said = told(router, "/v1/embeddings", asked)
    assert (status, told(decode, "/v1/embeddings", asked)[0]) == (404, 404)
    assert json.loads(said)["error"]["message"] == 'the decode engine answered 404: {"detail":"Not Found"}'


def test_a_pooling_model_has_no_chat(servers: tuple[Server, dict[str, Server], Server]) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    status, _, _, body = told(servers[0], "/v1/chat/completions", chat)
    assert (status, json.loads(body)["error"]["code"]) == (503, "no_decode_engine")
