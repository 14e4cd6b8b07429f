"""What breaks on real engines ends in one clear error or the right answer, in time, with every block back."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import TypeVar

import pytest

from integration.harness import (
    Harness,
    HttpError,
    Pool,
    Server,
    blocks_in_use,
    complete,
    complete_all,
    eventually,
    metric,
    opened,
)
from integration.prompts import LONG, PROMPT
from patience import PATIENCE_S
from pdcluster_cli.models.tiny_model import ModelShape, ensure_tiny_model

pytestmark = pytest.mark.engines

Client = TypeVar("Client", bound="Asking")

SMALL_CHUNKS = ("--max-num-batched-tokens", "32", "--no-enable-prefix-caching")
"""3,000 tokens take 94 steps: time enough to break something in between."""
QUICK = {"quarantine_s": 0.5, "hold_s": 0.5, "lease_s": 20.0, "handshake_timeout_s": 20.0}
"""Blocks come back soon; but a prefill engine of a crowded machine says nothing for seconds, and has not failed."""


def start_pool(harness: Harness) -> AbstractContextManager[Pool]:
    return harness.start_pool(
        prefill_args=SMALL_CHUNKS, decode_args=SMALL_CHUNKS, prefill_connector=QUICK, decode_connector=QUICK
    )


@pytest.fixture
def pool(harness: Harness) -> Iterator[Pool]:
    """For one test, which breaks it."""
    with start_pool(harness) as started:
        yield started


@pytest.fixture(scope="module")
def whole_pool(harness: Harness) -> Iterator[Pool]:
    """For all tests after which it serves as before."""
    with start_pool(harness) as started:
        yield started


def require_still_serving(pool: Pool, expected: dict[int, tuple[int, ...]]) -> None:
    assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
    assert complete(pool.url, PROMPT, 16).token_ids == expected[len(PROMPT)]


class Asking(threading.Thread):
    """One client in the background; ``answer`` or ``error`` when it has ended."""

    def __init__(self, pool: Pool, prompt: list[int], **body: object) -> None:
        super().__init__(name="client")
        self._pool, self._prompt, self._body = pool, prompt, body
        self.answer: tuple[int, ...] | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = complete(self._pool.url, self._prompt, 16, timeout_s=PATIENCE_S, **self._body).token_ids
        except (HttpError, HTTPException, OSError) as error:
            self.error = error


class Leaving(Asking):
    """A client of a stream that may leave while it waits."""

    def run(self) -> None:
        self._client = HTTPConnection("127.0.0.1", self._pool.router.port, timeout=PATIENCE_S)
        body = {"prompt": self._prompt, "max_tokens": 16, "temperature": 0, "stream": True}
        with closing(self._client), suppress(HTTPException, OSError):
            self._client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            self._client.getresponse().read()

    def leave(self) -> None:
        assert self._client.sock is not None
        self._client.sock.shutdown(socket.SHUT_RDWR)


def require_openai_error(error: Exception | None) -> str:
    """The error is an HTTP error with OpenAI's body; returns its message."""
    assert isinstance(error, HttpError), error
    assert error.status >= 500
    message = json.loads(error.body)["error"]["message"]
    assert message
    return str(message)


def stopped_in_the_middle(pool: Pool, begin: Callable[[], Client]) -> Client:
    """As ``stopped_one``, where there is one prefill engine."""
    return stopped_one(pool, begin)[0]


def stopped_one(pool: Pool, begin: Callable[[], Client]) -> tuple[Client, Server]:
    """A client whose prompt a prefill engine has begun, and this engine, which stands still in it. ``begin`` makes the
    client and asks for ``LONG``.

    A prompt that was over before this process saw it begin, having had no core meanwhile, is asked for anew.
    """
    for _ in range(20):
        pushed = {engine.name: len(engine.read_trace("push")) for engine in pool.prefill}
        client = begin()
        for engine in _busy_ones(pool.prefill, client):
            signal_all(engine, signal.SIGSTOP)
            if client.is_alive() and len(engine.read_trace("push")) == pushed[engine.name]:
                return client, engine
            signal_all(engine, signal.SIGCONT)
        client.join(PATIENCE_S)
        assert eventually(lambda: _num_pushed(pool) > sum(pushed.values()))  # noqa: B023  # called at once
    raise AssertionError("prefill was never seen in the middle of a prompt")


def _busy_ones(engines: tuple[Server, ...], client: Asking) -> list[Server]:
    """Those that compute; none: the client has its answer already."""
    busy: list[Server] = []

    def is_seen() -> bool:
        busy[:] = [engine for engine in engines if metric(engine.url, "vllm:num_requests_running") > 0]
        return bool(busy) or not client.is_alive()

    assert eventually(is_seen)
    return busy


def _num_pushed(pool: Pool) -> int:
    return sum(len(engine.read_trace("push")) for engine in pool.prefill)


def signal_all(engine: Server, number: signal.Signals) -> None:
    os.killpg(engine.handle.pid, number)


def test_a_prefill_engine_killed_in_the_middle_fails_the_request_and_decode_gets_its_blocks_back(pool: Pool) -> None:
    asking = stopped_in_the_middle(pool, lambda: Asking(pool, LONG))
    signal_all(pool.prefill[0], signal.SIGKILL)
    begin = time.monotonic()
    asking.join(PATIENCE_S)
    require_openai_error(asking.error)
    assert time.monotonic() - begin < 240, "the router has waited for the end of its time for prefill, 300 s"
    assert eventually(lambda: blocks_in_use(*pool.decode) == 0)
    pool.prefill[0].handle.wait(PATIENCE_S)
    asking = Asking(pool, PROMPT)
    asking.join(PATIENCE_S)
    assert "could not be prefilled" in require_openai_error(asking.error), (
        "the next one is told of an engine that is gone"
    )
    assert eventually(lambda: blocks_in_use(*pool.decode) == 0)


def test_with_policy_recompute_decode_answers_by_itself_when_prefill_dies(
    harness: Harness, expected: dict[int, tuple[int, ...]]
) -> None:
    with harness.start_pool(
        prefill_args=SMALL_CHUNKS, decode_args=SMALL_CHUNKS, prefill_connector=QUICK, decode_connector=QUICK,
        load_failure_policy="recompute",
    ) as pool:  # fmt: skip
        asking = stopped_in_the_middle(pool, lambda: Asking(pool, LONG))
        signal_all(pool.prefill[0], signal.SIGKILL)
        asking.join(PATIENCE_S)
        assert asking.answer == expected[len(LONG)]
        assert eventually(lambda: blocks_in_use(*pool.decode) == 0)


def test_a_client_that_leaves_during_prefill_frees_both_engines(
    whole_pool: Pool, expected: dict[int, tuple[int, ...]]
) -> None:
    prefill = whole_pool.prefill[0]

    def outcomes() -> list[str]:
        return sorted(push["outcome"] for push in prefill.read_trace("push")[num_before:])

    client = stopped_in_the_middle(whole_pool, lambda: Leaving(whole_pool, LONG))
    try:
        num_before = len(prefill.read_trace("push"))
        client.leave()
        assert eventually(lambda: blocks_in_use(*whole_pool.decode) == 0)
    finally:
        signal_all(prefill, signal.SIGCONT)
    client.join(PATIENCE_S)
    require_still_serving(whole_pool, expected)
    assert eventually(lambda: outcomes() == ["done", "failed"])


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_both_engines(
    whole_pool: Pool, expected: dict[int, tuple[int, ...]]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "stream": True, "ignore_eos": True}
    with opened(f"{whole_pool.url}/v1/completions", "POST", json.dumps(body).encode(), PATIENCE_S) as response:
        assert response.readline().startswith(b"data:")
    require_still_serving(whole_pool, expected)


def test_a_decode_engine_killed_in_the_middle_of_a_stream_cuts_it_without_a_clean_end(pool: Pool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "stream": True, "ignore_eos": True}
    with opened(f"{pool.url}/v1/completions", "POST", json.dumps(body).encode(), PATIENCE_S) as response:
        assert response.readline().startswith(b"data:")
        pool.decode[0].handle.signal(signal.SIGKILL)
        with pytest.raises((IncompleteRead, OSError)) as cut:
            response.read()
    assert b"[DONE]" not in getattr(cut.value, "partial", b"")
    assert eventually(lambda: blocks_in_use(*pool.prefill) == 0)


def test_a_decode_engine_killed_during_the_push_is_one_clear_error_and_prefill_gets_its_blocks_back(pool: Pool) -> None:
    asking = stopped_in_the_middle(pool, lambda: Asking(pool, LONG))
    pool.decode[0].handle.signal(signal.SIGKILL)
    signal_all(pool.prefill[0], signal.SIGCONT)
    asking.join(PATIENCE_S)
    require_openai_error(asking.error)
    assert eventually(lambda: blocks_in_use(*pool.prefill) == 0)


@pytest.mark.slow
def test_engines_with_other_block_sizes_are_told_the_cure(harness: Harness) -> None:
    with harness.start_pool(prefill_args=("--block-size", "64"), decode_args=("--block-size", "128")) as pool:
        asking = Asking(pool, PROMPT)
        asking.join(PATIENCE_S)
        assert "--block-size" in require_openai_error(asking.error)
        (line,) = pool.decode[0].read_trace("receive", 1)
        assert "pages of 64 tokens on prefill, 128 on decode" in line["reason"]
        assert "--block-size" in line["reason"]


@pytest.mark.slow  # `test_support_refusals.py` asks both, this one on older versions of vLLM too
@pytest.mark.parametrize(
    "shape", [ModelShape(num_layers=6), ModelShape(seed=8)], ids=["another shape", "only the weights differ"]
)
def test_engines_with_other_models_are_refused_before_any_byte(harness: Harness, shape: ModelShape) -> None:
    other: Path = ensure_tiny_model(shape)
    # The argument that comes last wins.
    with harness.start_pool(prefill_args=("--model", str(other)), router_args=()) as pool:
        asking = Asking(pool, PROMPT, model=str(harness.model))
        asking.join(PATIENCE_S)
        require_openai_error(asking.error)
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        assert all(line["num_bytes"] == 0 for line in pool.prefill[0].read_trace("push"))


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {
            "do_remote_prefill": True,
            "metaserver": "http://127.0.0.1:1/",
            "transfer_id": "t",
            "deadline_ms": 5000,
            "version": 1,
        },
    ],
    ids=["nothing else", "a whole reservation's worth"],
)
def test_a_prefill_engine_that_is_asked_to_decode_answers_by_itself(
    whole_pool: Pool, expected: dict[int, tuple[int, ...]], params: dict[str, object]
) -> None:
    """Swapped URLs on the router's command line do this."""
    answer = complete(whole_pool.prefill[0].url, PROMPT, 16, kv_transfer_params=params)
    assert answer.token_ids == expected[len(PROMPT)]
    require_still_serving(whole_pool, expected)


def test_a_stopped_prefill_engine_costs_the_deadline_and_no_more(
    whole_pool: Pool, expected: dict[int, tuple[int, ...]]
) -> None:
    signal_all(whole_pool.prefill[0], signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(HttpError) as error, opened_with_deadline(whole_pool, 3):
            pass
        assert error.value.status >= 500
        assert time.monotonic() - begin < QUICK["lease_s"]
        assert eventually(lambda: blocks_in_use(*whole_pool.decode) == 0)
    finally:
        signal_all(whole_pool.prefill[0], signal.SIGCONT)
    require_still_serving(whole_pool, expected)


def opened_with_deadline(pool: Pool, seconds: int) -> AbstractContextManager[HTTPResponse]:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return opened(
        f"{pool.url}/v1/completions", "POST", json.dumps(body).encode(), PATIENCE_S, {"x-request-timeout": str(seconds)}
    )


def test_preemption_on_prefill_by_a_small_cache_changes_no_answer(harness: Harness) -> None:
    prompts = [[100 + (number * (7 + turn)) % 800 for number in range(900)] for turn in range(12)]
    with harness.single_engine() as engine:
        wanted = [answer.token_ids for answer in complete_all(engine.url, prompts, 8)]
    # 6 MiB hold 1,536 tokens: not two of these prompts.
    small = ("--kv-cache-memory-bytes", str(6 << 20), "--max-num-batched-tokens", "128", "--max-model-len", "1400")
    with harness.start_pool(prefill_args=small) as pool:
        assert [answer.token_ids for answer in complete_all(pool.url, prompts, 8)] == wanted
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
