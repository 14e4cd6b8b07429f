"""Anthropic's SDK, and requests as Claude Code writes them, against real engines: as with one vLLM engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from integration.harness import Harness, Pool, Server, blocks_in_use, eventually, metric
from integration.prefilled import num_prefilled
from patience import PATIENCE_S
from pdcluster_router.core.apis.messages import NO_REASON

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.engines

TOOL_ARGS: Final = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CHUNKS: Final = ("--max-num-batched-tokens", "64", "--no-enable-prefix-caching")
"""A long prompt takes many steps: time enough to break something in between."""
QUESTION: Final = "Tell me a story about two engines and one long road. " * 12
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "name": "Read",
        "description": "Reads a file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]
WANTED: Final[dict[str, Any]] = {"max_tokens": 12, "temperature": 0}
SDK_WANTED: Final[dict[str, Any]] = {"max_tokens": 12, "extra_body": {"temperature": 0}}
"""The SDK has no word for it any more."""

CLAUDE_CODE_HEADERS: Final = {
    "accept": "application/json",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.69 (external, cli)",
    "x-app": "cli",
    "x-stainless-helper-method": "stream",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
"""The shape of Claude Code 2.1's requests, as its public captures show it; the words are ours."""
EPHEMERAL: Final = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: Final[dict[str, Any]] = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.69.0d9; cc_entrypoint=cli; cch=fa690;"},
        {"type": "text", "text": "You work in a terminal. " * 20, **EPHEMERAL},
    ],
    "tools": TOOLS,
    "metadata": {"user_id": "user_0784_account_261d_session_b4e5"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": QUESTION}, {"type": "text", "text": "Go on.", **EPHEMERAL}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I shall look.", "signature": "c2ln"},
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "one\ntwo"}]},
                {"type": "text", "text": "What does it say?"},
            ],
        },
    ],
}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "text": {"messages": [{"role": "user", "content": QUESTION}]},
    "system": {"system": QUESTION, "messages": [{"role": "user", "content": "Go on."}]},
    "stop": {"messages": [{"role": "user", "content": QUESTION}], "stop_sequences": ["e"]},
    "any_tool": {"messages": [{"role": "user", "content": QUESTION}], "tools": TOOLS, "tool_choice": {"type": "any"}},
    "named_tool": {
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "Read"},
        "stream": True,  # A plain answer whose arguments were cut off is an error of vLLM's.
    },
    "claude_code": CLAUDE_CODE,
    "bad_tokens": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": -1},
    "bad_role": {"messages": [{"role": "nobody", "content": QUESTION}]},
    "too_long": {"messages": [{"role": "user", "content": "long " * 9000}]},
    "bad_model": {"messages": [{"role": "user", "content": QUESTION}], "model": "no such model"},
}
_IDS: Final = re.compile(rb"chatcmpl-[\w-]+|call_[\w-]+|toolu_[\w-]+")


ALIAS = "claude-of-ours"


@pytest.fixture(scope="module")
def servers(harness: Harness) -> Iterator[tuple[Pool, Server]]:
    with (
        harness.start_pool(
            prefill_args=TOOL_ARGS,
            decode_args=TOOL_ARGS,
            router_args=("--model-alias", f"{ALIAS}={harness.model}"),
        ) as pool,
        harness.single_engine(TOOL_ARGS) as engine,
    ):
        yield pool, engine


def client_of(url: str) -> anthropic.Anthropic:
    import anthropic  # 2 s, which each worker of a run would take at the top of the file

    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def model_of(server: Pool | Server) -> str:
    return str(httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"])


def posted(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/messages?beta=true", json=body, headers=CLAUDE_CODE_HEADERS, timeout=PATIENCE_S)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_an_answer_is_the_single_engines_byte_for_byte(
    servers: tuple[Pool, Server], name: str, is_stream: bool
) -> None:
    pool, engine = servers
    body = {"model": model_of(pool), **WANTED, "stream": is_stream, **BODIES[name]}
    since = time.monotonic()
    ours, theirs = posted(pool.url, body), posted(engine.url, body)
    told = [_IDS.sub(b"ID", answer.content) for answer in (ours, theirs)]
    if body["stream"] and ours.status_code == 200:
        told = [b"".join(_joined(one)) for one in told]
    if name == "bad_model":  # vLLM tells its names, and ours tells the alias after them.
        told[1] = told[1].replace(b"<path>", f"<path>, {ALIAS}.".encode())
    assert (ours.status_code, told[0]) == (theirs.status_code, told[1])
    assert (ours.status_code == 200) is not name.startswith(("bad", "too"))
    assert eventually(lambda: num_prefilled(pool, since) == (ours.status_code == 200))


def _joined(stream: bytes) -> Iterator[bytes]:
    """The events, with neighbouring texts as one: vLLM joins tokens that come while its API server is busy."""
    text = ""
    for event in stream.removesuffix(b"\n\n").split(b"\n\n"):
        data = json.loads(event.partition(b"\ndata: ")[2])
        delta = data.get("delta") or {}
        piece = delta.get("text") or delta.get("partial_json") or delta.get("thinking")
        if piece is not None:
            text += piece
            continue
        yield text.encode() + event + b"\n\n"
        text = ""


def test_the_sdk_reads_an_answer_a_stream_and_the_number_of_tokens(servers: tuple[Pool, Server]) -> None:
    pool, single = (client_of(server.url) for server in servers)
    wanted: dict[str, Any] = {"model": model_of(servers[0]), **SDK_WANTED, **BODIES["text"]}
    ours, theirs = pool.messages.create(**wanted), single.messages.create(**wanted)
    assert (ours.content, ours.stop_reason, ours.usage) == (theirs.content, theirs.stop_reason, theirs.usage)
    assert ours.stop_reason == "max_tokens"
    with pool.messages.stream(**wanted) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert (text, last.stop_reason) == (ours.content[0].text, "max_tokens")
    counted = pool.messages.count_tokens(model=wanted["model"], messages=wanted["messages"])
    assert counted.input_tokens == ours.usage.input_tokens


def test_an_alias_is_answered_as_its_model_under_the_models_own_name(servers: tuple[Pool, Server]) -> None:
    pool, single = (client_of(server.url) for server in servers)
    wanted: dict[str, Any] = {"model": model_of(servers[0]), **SDK_WANTED, **BODIES["text"]}
    theirs = single.messages.create(**wanted)
    ours = pool.messages.create(**{**wanted, "model": ALIAS})
    assert (ours.content, ours.stop_reason, ours.usage) == (theirs.content, theirs.stop_reason, theirs.usage)
    assert ours.model == theirs.model == wanted["model"]
    with pool.messages.stream(**{**wanted, "model": ALIAS}) as stream:
        assert stream.get_final_message().model == wanted["model"]
    counted = pool.messages.count_tokens(model=ALIAS, messages=wanted["messages"])
    assert counted.input_tokens == ours.usage.input_tokens


def test_errors_are_the_sdks_own_and_leave_nothing_behind(servers: tuple[Pool, Server]) -> None:
    import anthropic

    pool = client_of(servers[0].url)
    wanted: dict[str, Any] = {"model": model_of(servers[0]), **SDK_WANTED, **BODIES["text"]}
    with pytest.raises(anthropic.NotFoundError):
        pool.messages.create(**{**wanted, "model": "no such model"})
    with pytest.raises(anthropic.BadRequestError):
        pool.messages.create(**{**wanted, "max_tokens": -1})
    with pytest.raises(anthropic.BadRequestError, match="only this router writes it"):
        pool.messages.create(**{**wanted, "extra_body": {"vllm_xargs": {"kv_transfer_params": "x"}}})
    assert eventually(lambda: blocks_in_use(*servers[0].engines) == 0)


def test_a_stream_that_is_closed_early_frees_both_engines(servers: tuple[Pool, Server]) -> None:
    pool = client_of(servers[0].url)
    wanted: dict[str, Any] = {"model": model_of(servers[0]), **SDK_WANTED, **BODIES["text"], "max_tokens": 4000}
    stream = pool.messages.create(**wanted, stream=True)
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


def test_a_prefill_that_dies_is_one_error_in_anthropics_shape(harness: Harness) -> None:
    with harness.start_pool(prefill_args=CHUNKS, decode_args=CHUNKS) as pool:
        os.killpg(pool.prefill[0].handle.pid, signal.SIGSTOP)  # or it may have ended before anyone sees it begin
        both = asking_both(pool, {"messages": [{"role": "user", "content": "road " * 2500}]})
        assert eventually(lambda: are_both(pool, both, "vllm:num_requests_waiting"))
        pool.prefill[0].handle.signal(signal.SIGKILL)
        for asking in both:
            assert asking.error() == ("api_error", "prefill_failed")
            assert b"message_start" not in asking.told
        assert eventually(lambda: blocks_in_use(*pool.decode) == 0)


def test_an_answer_that_decode_gives_up_is_no_answer(harness: Harness) -> None:
    with harness.start_pool(env={"VLLM_SERVER_DEV_MODE": "1"}) as pool:
        both = asking_both(pool, {**BODIES["text"], "max_tokens": 6000})
        decode = pool.decode[0].url
        assert eventually(lambda: are_both(pool, both, "vllm:num_requests_running"))
        assert eventually(lambda: metric(decode, "vllm:generation_tokens_total") > 6)
        assert httpx.post(f"{decode}/pause?mode=abort", timeout=PATIENCE_S).status_code == 200
        for asking in both:
            assert asking.error() == ("api_error", "decode_lost")
            assert b"message_stop" not in asking.told
            assert NO_REASON.encode() in asking.told


class Asking(threading.Thread):
    """One client in the background, which reads all that it is told, also of an answer that is cut."""

    def __init__(self, pool: Pool, body: dict[str, Any], *, is_stream: bool) -> None:
        super().__init__(name="client")
        self._url = f"{pool.url}/v1/messages"
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

    def error(self) -> tuple[str, str]:
        """Type and code of the error that is the answer, or a stream's last event."""
        self.join(PATIENCE_S)
        assert self.told
        assert not self._is_whole
        said = json.loads(self.told.rpartition(b"\ndata: ")[2])
        assert said["type"] == "error"
        return said["error"]["type"], said["error"]["code"]
