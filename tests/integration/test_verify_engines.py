"""An operator's order to verify, on real engines: what is pushed counts, and what only looks well does not."""

from __future__ import annotations

import http.client
import json
import time
from functools import partial
from typing import Any, Final

import pytest

from integration.harness import Harness, Pool, blocks_in_use, complete, eventually, metric
from patience import PATIENCE_S
from pdcluster_cli.processes.engines import LOOPBACK
from pdcluster_protocol.secret import load_secret
from zoo.cases import CASES
from zoo.pools import engines

pytestmark = pytest.mark.engines

SECRET: Final = load_secret({}, host=LOOPBACK)
"""The one of engines that were given none."""


def verify(pool: Pool, **order: Any) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer."""
    body = json.dumps(order).encode()
    headers = {"authorization": f"Bearer {SECRET.mint_pass(body, int(time.time()) + 60)}"}
    connection = http.client.HTTPConnection(LOOPBACK, pool.router.internal_port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/pdcluster/verify", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def has_received(pool: Pool, number: int) -> bool:
    return metric(pool.decode[0].url, "pdcluster:receives_done_total") == number


def test_a_pool_that_hands_kv_over_is_verified_again_and_again(harness: Harness) -> None:
    with harness.start_pool() as pool:
        for number in (1, 2):
            status, told = verify(pool)
            assert (status, told["verified"]) == (200, True)
            assert told["pushed_tokens"] == told["prompt_tokens"] >= 300, "no prefix cache had any of it"
            assert told["pushed_tokens"] >= told["block_tokens"] > 0
            assert told["is_content_compared"] is True
            assert told["transfer_protocol"] == "tcp"
            assert eventually(partial(has_received, pool, number))
        assert all(metric(engine.url, "pdcluster:transfer_protocol_info") == 1 for engine in pool.engines)
        (first, second) = pool.prefill[0].read_trace("push", 2)
        assert first["num_bytes"] > 0
        assert second["num_bytes"] > 0
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        assert complete(pool.url, "Hello", 4).reply.get("kv_transfer_params") is None


@pytest.mark.parametrize(
    "name",
    [
        "mistral 2 to 1",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("delta net", "delta net 2 to 1", "mamba2 1 to 2", "gemma2 1 to 2", "mla 2 to 1", "mla 1 to 2")
        ),
    ],
)
def test_content_is_compared_whatever_the_model_and_the_ranks_are(harness: Harness, name: str) -> None:
    case = CASES[name]()
    with engines(harness, case, [case.prefill], [case.decode]) as (prefills, decodes):
        with harness.router(prefills, decodes) as router:
            status, told = verify(Pool(router, prefills, decodes))
            assert (status, told.get("is_content_compared")) == (200, True), told
        received = decodes[0].read_trace("receive", case.decode.tp)
        assert [line["is_content_compared"] for line in received] == [True] * case.decode.tp


@pytest.mark.slow
def test_a_model_with_a_short_context_is_verified_with_a_shorter_prompt(harness: Harness) -> None:
    short = ("--max-model-len", "256", "--block-size", "32")
    with harness.start_pool(prefill_args=short, decode_args=short) as pool:
        status, told = verify(pool)
        assert status == 200
        assert 60 <= told["pushed_tokens"] < 256


@pytest.mark.slow
def test_blocks_that_the_first_prompt_does_not_fill_get_a_longer_one(harness: Harness) -> None:
    large = ("--block-size", "2048")
    with harness.start_pool(prefill_args=large, decode_args=large) as pool:
        status, told = verify(pool)
        assert status == 200
        assert told["pushed_tokens"] >= told["block_tokens"] == 2048


def test_answers_that_decode_computes_alone_verify_nothing(harness: Harness) -> None:
    """The engines do not fit, and decode may recompute: clients see nothing but slow answers."""
    with harness.start_pool(
        prefill_args=("--block-size", "64"), decode_args=("--block-size", "128"), load_failure_policy="recompute"
    ) as pool:
        assert complete(pool.url, "Why is the sky blue? " * 20, 8).text
        status, told = verify(pool)
        assert status == 409
        message = told["error"]["message"]
        assert message.startswith("prefill-0 and decode-0: ")
        assert "pages of 64 tokens on prefill, 128 on decode" in message
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
