"""LangChain against a pool says what it says against one engine. It is installed into a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from gateway.packages import folder_with
from integration.harness import Harness
from patience import PATIENCE_S

pytestmark = [pytest.mark.engines, pytest.mark.costly]

ASKS = """
import json, sys
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
known = {"base_url": url + "/v1", "api_key": "none", "model": model, "temperature": 0, "max_tokens": 12}
chat = ChatOpenAI(**known)
asked = [SystemMessage("Be kind."), HumanMessage("Tell me of two engines and one long road. " * 8)]
whole = chat.invoke(asked)
pieces = list(chat.stream(asked, stream_usage=True))
tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
print(json.dumps({
    "whole": whole.content,
    "usage": whole.response_metadata["token_usage"]["total_tokens"],
    "streamed": "".join(piece.content for piece in pieces),
    "streams usage": [piece.usage_metadata["total_tokens"] for piece in pieces if piece.usage_metadata],
    "tools": chat.bind_tools(tools, tool_choice="none").invoke(asked).content,
    "batch": [one.content for one in chat.batch(["One?", "Two?"])],
    "completion": OpenAI(**known).invoke("Why is the sky blue"),
}))
"""


def answers_of(url: str, model: str) -> dict[str, Any]:
    environ = {**os.environ, "PYTHONPATH": str(folder_with("clients.lock")), "LANGSMITH_TRACING": "false"}
    asking = [sys.executable, "-c", ASKS, url, model]
    done = subprocess.run(asking, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_langchain_says_the_same_of_a_pool_and_of_one_engine(harness: Harness) -> None:
    with harness.start_pool() as pool, harness.single_engine() as single:
        ours, theirs = (answers_of(url, str(harness.model)) for url in (pool.url, single.url))
        assert len(pool.prefill[0].read_trace("push", 4)) >= 4
    assert ours == theirs
    assert ours["whole"] == ours["streamed"] != ""
    assert ours["streams usage"] == [ours["usage"]]
