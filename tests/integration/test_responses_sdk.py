"""OpenAI's SDK and Codex's requests to the Responses API, against real engines: as with one vLLM engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx
import openai
import pytest

from integration.harness import Harness, Pool, Server, blocks_in_use, eventually, metric
from integration.prefilled import num_prefilled
from patience import PATIENCE_S
from pdcluster_router.core.apis.responses import NOT_WHOLE

pytestmark = pytest.mark.engines

TOOL_ARGS: Final = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CHUNKS: Final = ("--max-num-batched-tokens", "64", "--no-enable-prefix-caching")
"""A long prompt takes many steps: time enough to break something in between."""
QUESTION: Final = "Tell me a story about two engines and one long road. " * 12
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a command",
        "strict": False,
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]
WANTED: Final[dict[str, Any]] = {"max_output_tokens": 12, "temperature": 0}
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

CODEX_HEADERS: Final = {
    "accept": "text/event-stream",
    "authorization": "Bearer none",
    "conversation_id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "openai-beta": "responses=experimental",
    "originator": "codex_cli_rs",
    "session_id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "user-agent": "codex_cli_rs/0.63.0 (Debian 12; x86_64)",
    "version": "0.63.0",
}
"""The shape of Codex's requests, as its source shows it (openai/codex, ``codex-rs/core/src/client.rs``); the words are
ours."""
CODEX: Final[dict[str, Any]] = {
    "instructions": "You work in a terminal. " * 20,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "function_call", "name": "shell", "arguments": '{"path":"a.txt"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "one\ntwo"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What does it say?"}]},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "store": False,
    "include": [],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "text": {"input": QUESTION},
    "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]},
    "instructions": {"instructions": QUESTION, "input": "Go on."},
    "required_tool": {"input": QUESTION, "tools": TOOLS, "tool_choice": "required"},
    "named_tool": {"input": QUESTION, "tools": TOOLS, "tool_choice": {"type": "function", "name": "shell"}},
    "schema": {"input": QUESTION, "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "logprobs": {"input": QUESTION, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "stored": {"input": QUESTION, "store": True, "metadata": {"a": "b"}},
    "codex": CODEX,
    "bad_tokens": {"input": QUESTION, "max_output_tokens": -1},
    "bad_input": {"input": 7},
    "bad_template": {"input": QUESTION, "prompt": {"id": "p"}},
    "too_long": {"input": "long " * 9000},
    "bad_model": {"input": QUESTION, "model": "no such model"},
}
_IDS: Final = re.compile(rb"(?:resp|msg|call|fc|rs)_[\w-]+|chatcmpl-tool-[\w-]+")
_FREE: Final = re.compile(rb'("created_at"|"cached_tokens"|"cache_write_tokens"):\d+')
"""Seconds, and the tokens that decode had or computed: pushed ones count as cached."""
_WHOLE: Final = b'"kv_transfer_params":{"pdcluster_is_whole":true}'


@pytest.fixture(scope="module")
def servers(harness: Harness) -> Iterator[tuple[Pool, Server]]:
    with (
        harness.start_pool(prefill_args=TOOL_ARGS, decode_args=TOOL_ARGS) as pool,
        harness.single_engine(TOOL_ARGS) as engine,
    ):
        yield pool, engine


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def model_of(server: Pool | Server) -> str:
    return str(httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"])


def posted(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/responses", json=body, headers=CODEX_HEADERS, timeout=PATIENCE_S)


@pytest.mark.parametrize("is_stream", [pytest.param(False, marks=pytest.mark.costly), True])
@pytest.mark.parametrize("name", BODIES)
def test_an_answer_is_the_single_engines(servers: tuple[Pool, Server], name: str, is_stream: bool) -> None:
    pool, engine = servers
    body = {"model": model_of(pool), **WANTED, "stream": is_stream, **BODIES[name]}
    since = time.monotonic()
    ours, theirs = posted(pool.url, body), posted(engine.url, body)
    is_good = ours.status_code == 200
    assert ours.content.count(_WHOLE) == is_good
    told = [_FREE.sub(rb"\1:0", _IDS.sub(b"ID", answer.content)) for answer in (ours, theirs)]
    told[0] = told[0].replace(_WHOLE, b'"kv_transfer_params":null')
    if is_stream and is_good:
        told = [b"".join(_joined(one)) for one in told]
    assert (ours.status_code, told[0]) == (theirs.status_code, told[1])
    assert is_good is not name.startswith(("bad", "too"))
    assert eventually(lambda: num_prefilled(pool, since) == is_good)


def _joined(stream: bytes) -> Iterator[bytes]:
    """The events, with neighbouring texts as one and without their numbers: vLLM joins tokens that come while its API
    server is busy."""
    text = ""
    for event in stream.removesuffix(b"\n\n").split(b"\n\n"):
        name, _, said = event.partition(b"\ndata: ")
        data = json.loads(said)
        del data["sequence_number"]
        if name.endswith(b".delta"):
            text += data["delta"]
            continue
        yield text.encode() + name + json.dumps(data).encode()
        text = ""


def test_the_sdk_reads_an_answer_a_stream_and_a_conversation(servers: tuple[Pool, Server]) -> None:
    pool, single = (client_of(server.url) for server in servers)
    wanted: dict[str, Any] = {"model": model_of(servers[0]), **WANTED, **BODIES["text"]}
    ours, theirs = pool.responses.create(**wanted), single.responses.create(**wanted)
    assert (ours.output_text, ours.status) == (theirs.output_text, theirs.status)
    assert ours.status == "incomplete"
    assert ours.usage is not None
    assert theirs.usage is not None
    assert (ours.usage.input_tokens, ours.usage.output_tokens) == (theirs.usage.input_tokens, 12)
    with pool.responses.stream(**wanted) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        last = stream.get_final_response()
    assert text == last.output_text == ours.output_text
    talk = [
        {"role": "user", "content": QUESTION},
        *(item.model_dump(exclude_none=True) for item in ours.output),
        {"role": "user", "content": "Go on."},
    ]
    answers = [client.responses.create(**{**wanted, "input": talk}).output_text for client in (pool, single)]
    assert answers[0] == answers[1]


def test_errors_are_the_sdks_own_and_leave_nothing_behind(servers: tuple[Pool, Server]) -> None:
    pool = client_of(servers[0].url)
    wanted: dict[str, Any] = {"model": model_of(servers[0]), **WANTED, **BODIES["text"]}
    with pytest.raises(openai.NotFoundError):
        pool.responses.create(**{**wanted, "model": "no such model"})
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
        pool.responses.create(**wanted, previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        pool.responses.retrieve("resp_1")
    assert eventually(lambda: blocks_in_use(*servers[0].engines) == 0)


def test_a_stream_that_is_closed_early_frees_both_engines(servers: tuple[Pool, Server]) -> None:
    pool = client_of(servers[0].url)
    wanted: dict[str, Any] = {"model": model_of(servers[0]), **WANTED, **BODIES["text"], "max_output_tokens": 4000}
    stream = pool.responses.create(**wanted, stream=True)
    next(iter(stream))
    stream.close()
    engines = servers[0].engines
    assert eventually(lambda: sum(metric(engine.url, "vllm:num_requests_running") for engine in engines) == 0)
    assert eventually(lambda: blocks_in_use(*engines) == 0)


def asking_both(pool: Pool, body: dict[str, Any]) -> tuple[Asking, Asking]:
    """Two clients: one takes a plain answer, one a stream."""
    return Asking(pool, body, is_stream=False), Asking(pool, body, is_stream=True)


def are_both(pool: Pool, both: tuple[Asking, Asking], name: str) -> bool:
    """Whether decode counts both so. Also if one has its answer: its client then says what came, and nothing hangs."""
    return metric(pool.decode[0].url, name) == len(both) or not all(asking.is_alive() for asking in both)


@pytest.mark.costly
def test_a_prefill_that_dies_is_one_error(harness: Harness) -> None:
    with harness.start_pool(prefill_args=CHUNKS, decode_args=CHUNKS) as pool:
        os.killpg(pool.prefill[0].handle.pid, signal.SIGSTOP)  # or it may have ended before anyone sees it begin
        both = asking_both(pool, {"input": "road " * 2500})
        assert eventually(lambda: are_both(pool, both, "vllm:num_requests_waiting"))
        pool.prefill[0].handle.signal(signal.SIGKILL)
        for asking in both:
            assert asking.code() == "prefill_failed"
            assert b"response.created" not in asking.told
        assert eventually(lambda: blocks_in_use(*pool.decode) == 0)


@pytest.mark.costly
def test_an_answer_that_decode_gives_up_is_no_answer(harness: Harness) -> None:
    with harness.start_pool(env={"VLLM_SERVER_DEV_MODE": "1"}) as pool:
        both = asking_both(pool, {**BODIES["text"], "max_output_tokens": 6000})
        decode = pool.decode[0].url
        assert eventually(lambda: are_both(pool, both, "vllm:num_requests_running"))
        assert eventually(lambda: metric(decode, "vllm:generation_tokens_total") > 6)
        assert httpx.post(f"{decode}/pause?mode=abort", timeout=PATIENCE_S).status_code == 200
        for asking in both:
            assert asking.code() == "decode_lost"
            assert b"response.completed" not in asking.told
            assert NOT_WHOLE.encode() in asking.told


class Asking(threading.Thread):
    """One client in the background, which reads all that it is told, also of an answer that is cut."""

    def __init__(self, pool: Pool, body: dict[str, Any], *, is_stream: bool) -> None:
        super().__init__(name="client")
        self._url = f"{pool.url}/v1/responses"
        self._body = {"model": model_of(pool), **WANTED, "stream": is_stream, **body}
        self.told = b""
        self._is_whole = False
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as answer,
        ):
            for piece in answer.iter_bytes():
                self.told += piece
            self._is_whole = answer.status_code == 200

    def code(self) -> str:
        """The code of the error that is the answer, or a stream's last event."""
        self.join(PATIENCE_S)
        assert self.told
        assert not self._is_whole
        code: str = json.loads(self.told.rpartition(b"\ndata: ")[2])["error"]["code"]
        return code
